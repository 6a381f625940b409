"""The vision part of GGUF files (`mmproj`): the towers of Qwen2.5-VL and Qwen3-VL, written as llama.cpp does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.programs import ended
from tests.workers.checkpoint.gguf_files import add_sizes, add_tokenizer, write_to_file
from tests.workers.driver import Checkpoints, inspect
from vsched.checkpoints import local_checkpoint
from vsched.errors import CheckpointError
from vsched_workers.checkpoint.gguf import open_gguf
from vsched_workers.checkpoint.gguf_vision import KINDS, fits, read_vision
from vsched_workers.plugin import TransformersPlugin

gguf: Any = pytest.importorskip("gguf")

TYPES = {"nano25": "qwen2vl", "nano3": "qwen3vl"}
TOWER = "model.visual."
MERGER = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
LEVEL = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}


def tower_of(path: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tower, by the newest names."""
    tensors = load_file(path / "model.safetensors")
    named = {name.replace("model.visual.", "visual."): each for name, each in tensors.items()}
    return {f"model.{name}": each for name, each in named.items() if name.startswith("visual.")}


def gguf_tensors(config: Any, tower: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the tensors by their names in llama.cpp."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 3)
    made = {}
    for full, given in tower.items():
        layer, _, end = full.removeprefix(TOWER).rpartition(".")
        value, parts = given.float().numpy(), layer.split(".")
        if layer.endswith("attn.qkv") and config.model_type == "qwen2_5_vl_vision":
            for part, third in zip("qkv", value.reshape(3, -1, *value.shape[1:]), strict=True):
                made[f"{names.get_name(f'visual.{layer[:-3]}{part}')}.{end}"] = third
        elif parts[0] == "merger" and parts[1] in MERGER:
            made[f"{MERGER[parts[1]]}.{end}"] = value
        elif parts[0] == "deepstack_merger_list":
            index = config.deepstack_visual_indexes[int(parts[1])]
            made[f"v.deepstack.{index}.{LEVEL[parts[2]]}.{end}"] = value
        elif layer == "patch_embed.proj" and end == "weight":
            made["v.patch_embd.weight"], made["v.patch_embd.weight.1"] = (
                value[:, :, 0],
                value[:, :, 1],
            )
        else:
            made[f"{names.get_name(f'visual.{layer}')}.{end}"] = value
    return made


def close(writer: Any, tensors: dict[str, Any]) -> None:
    for name, value in tensors.items():
        writer.add_tensor(name, value.copy())
    write_to_file(writer)


def write_tower(path: Path, checkpoint: Path, without: str = "no tensor") -> Path:
    config = transformers.AutoConfig.from_pretrained(checkpoint).vision_config
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config.out_hidden_size)
    writer.add_vision_patch_size(config.patch_size)
    writer.add_vision_embedding_length(config.hidden_size)
    writer.add_vision_feed_forward_length(config.intermediate_size)
    writer.add_vision_block_count(config.depth)
    writer.add_vision_head_count(config.num_heads)
    writer.add_vision_image_mean([0.5, 0.25, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.25])
    if config.model_type == "qwen2_5_vl_vision":
        writer.add_clip_projector_type("qwen2.5vl_merger")
        writer.add_vision_n_wa_pattern(config.fullatt_block_indexes[0] + 1)
    else:
        writer.add_clip_projector_type("qwen3vl_merger")
        writer.add_vision_spatial_merge_size(config.spatial_merge_size)
        levels = [index in config.deepstack_visual_indexes for index in range(config.depth)]
        writer.add_vision_is_deepstack_layers(levels)
    tensors = gguf_tensors(config, tower_of(checkpoint))
    close(writer, {name: each for name, each in tensors.items() if without not in name})
    return path


class Sections:
    """A reader of a language model's file, as far as the tower needs it."""

    def get_field(self, name: str) -> Any:
        assert name.endswith(".rope.dimension_sections")
        return self

    def contents(self) -> list[int]:
        return [2, 3, 3, 0]


@pytest.mark.parametrize("size", TYPES)
def test_tower_has_the_weights_and_settings_of_its_checkpoint(
    checkpoints: Checkpoints, tmp_path: Path, size: str
) -> None:
    source = checkpoints(size)
    given = transformers.AutoConfig.from_pretrained(source)
    kind, text = KINDS[TYPES[size]], given.text_config
    config: Any = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}[kind.text]
    language = config(**{key: each for key, each in text.to_dict().items() if key != "model_type"})
    words = transformers.AutoTokenizer.from_pretrained(source).get_vocab()
    tower = open_gguf(write_tower(tmp_path / "mmproj.gguf", source))
    assert fits(tower, TYPES[size], 64)
    assert not fits(tower, TYPES[size], 128)
    assert [fits(tower, each, 64) for each in ("llama", *KINDS)].count(True) == 1
    found = read_vision(tower, TYPES[size], Sections(), language, words)
    wanted = tower_of(source)
    assert found.weights.keys() == wanted.keys()
    assert all(
        torch.equal(each, wanted[name].to(each.dtype)) for name, each in found.weights.items()
    )
    made, wanted_settings = found.config.vision_config.to_dict(), given.vision_config.to_dict()
    for name in ("initializer_range", "tokens_per_second"):  # of random models, they are others
        made.pop(name, None)
        wanted_settings.pop(name, None)
    assert made == wanted_settings
    assert found.config.image_token_id == given.image_token_id
    assert found.config.text_config.rope_parameters["mrope_section"] == [2, 3, 3]
    assert (found.processor["merge_size"], found.processor["image_mean"]) == (2, [0.5, 0.25, 0.5])
    with pytest.raises(CheckpointError, match=r"vocabulary has no <\|image_pad\|>"):
        read_vision(tower, TYPES[size], Sections(), language, {})
    del tower.fields["clip.vision.image_mean"]
    with pytest.raises(CheckpointError, match=r"lacks clip\.vision\.image_mean\. Remedy"):
        read_vision(tower, TYPES[size], Sections(), language, words)


def test_architectures_are_known_without_torch() -> None:
    """The engine asks for them, and starts the process of a conversion."""
    tools = TransformersPlugin()
    assert {name for name in ("llama", *KINDS) if tools.reads_mmproj(name)} == {*KINDS}
    code = "import sys, vsched_workers.checkpoint.gguf; sys.exit('torch' in sys.modules)"
    assert ended("-c", code).returncode == 0


@pytest.mark.slow
def test_gguf_file_with_its_vision_part_takes_images(
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The checkpoint that the files were made of is the same, tensor by tensor."""
    source = checkpoints("nano25")
    config = transformers.AutoConfig.from_pretrained(source).text_config
    tensors = load_file(source / "model.safetensors")
    language = {
        name.replace("model.language_model.", "model."): each
        for name, each in tensors.items()
        if "visual." not in name
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2VL, config.num_hidden_layers)
    writer = gguf.GGUFWriter(tmp_path / "nano.gguf", "qwen2vl")
    writer.add_name("nano")
    add_sizes(writer, config, context=config.max_position_embeddings)
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    add_tokenizer(writer, tokenizer, pre="gpt-2", end="<|im_end|>")
    writer.add_chat_template(tokenizer.chat_template)
    close(
        writer,
        {
            names.get_name(name, (".weight", ".bias")): each.float().numpy()
            for name, each in language.items()
        },
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text_only = Path(local_checkpoint(str(tmp_path / "nano.gguf")))
    assert not inspect(text_only).takes_images
    write_tower(tmp_path / "mmproj-nano.gguf", source)
    folder = Path(local_checkpoint(str(tmp_path / "nano.gguf")))
    made, given = inspect(folder), inspect(source)
    assert (made.family, made.takes_images) == (given.family, True)
    assert made.image_token_id == given.image_token_id
    found = load_file(folder / "model.safetensors")
    for name, each in {**language, **tower_of(source)}.items():
        full = (
            name if name.startswith(TOWER) else name.replace("model.", "model.language_model.", 1)
        )
        assert torch.equal(found[full], each.bfloat16()), name
    config_file = json.loads((folder / "config.json").read_text())
    assert config_file["text_config"]["rope_parameters"] == config.rope_parameters
    assert "_name_or_path" not in config_file["text_config"]
    write_tower(tmp_path / "mmproj-nano.gguf", source, without="mm.2")
    with pytest.raises(CheckpointError, match=r"vision tower lacks mm\.2\.\w+\. Remedy"):
        local_checkpoint(str(tmp_path / "nano.gguf"))
    write_tower(tmp_path / "mmproj-nano.gguf", checkpoints("nano3"))
    assert not inspect(Path(local_checkpoint(str(tmp_path / "nano.gguf")))).takes_images
    assert (
        "mmproj-nano.gguf is not read: it is the vision part of another" in capfd.readouterr().err
    )
