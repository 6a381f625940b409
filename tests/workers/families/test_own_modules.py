"""Modules without transformers: bit-identical results, and what falls back."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoConfig

from tests.parity.architectures import make_checkpoint
from tests.patience import PATIENCE_S
from tests.programs import printed_by
from tests.workers.driver import Checkpoints
from vsched.errors import CheckpointError
from vsched.types import ItemPlace
from vsched.worker.contract import WorkerSettings
from vsched_workers.families import FAMILIES, OwnQwen25Vl, family_of_rank, language_family
from vsched_workers.families.decoders import DECODERS, TextFamily
from vsched_workers.families.own_families import OwnText
from vsched_workers.families.qwen_image import _GRID, with_time

NAME = "qwen2_5_vl"
LIBRARY = FAMILIES[NAME]
CAUSAL = "causal attention of this test"
SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


Configure = Callable[..., str]


@pytest.fixture
def configured(checkpoints: Checkpoints, tmp_path: Path) -> Configure:
    """Write a small configuration with other entries; None removes one of a part for text or images."""

    def write(name: str, **entries: Any) -> str:
        if name == NAME:
            shutil.copy(checkpoints("nano25") / "config.json", tmp_path)
        else:
            AutoConfig.for_model(name, **SMALL).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        for key, value in entries.items():
            if key in {"text_config", "vision_config"}:
                value = {**config[key], **value}
                value = {name: each for name, each in value.items() if each is not None}
            config[key] = value
        return str(write_config(tmp_path, **config))

    return write


def write_config(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(params=["layout", "older layout"])
def own(request: pytest.FixtureRequest, configured: Configure) -> tuple[OwnQwen25Vl, str]:
    """Return the family with vsched's own modules for the smallest checkpoint, and the path of its configuration."""
    path = configured(NAME)
    if request.param == "older layout":
        write_config(Path(path), **older(json.loads(Path(path, "config.json").read_text())))
    family = family_of_rank(NAME, path, WorkerSettings())
    assert isinstance(family, OwnQwen25Vl)
    return family, path


def filled(built: Any, like: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return two modules with the same random weights, which requires the same names and shapes."""
    torch.manual_seed(5)
    weights = {name: torch.randn(each.shape) / 6 for name, each in like.state_dict().items()}
    made = []
    for module in (built, like):
        module.load_state_dict(weights, strict=True)
        frequencies = {name: each.clone() for name, each in module.named_buffers()}
        module.to(dtype).eval().requires_grad_(requires_grad=False)
        for name, each in frequencies.items():  # loading keeps them in float32
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, each)
        made.append(module)
    return made[0], made[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "grids",
    [[(1, 16, 16)], [(1, 8, 24)], [(1, 2, 2)], [(1, 10, 14), (1, 4, 30), (1, 16, 8)], [(2, 6, 10)]],
)
def test_tower_equals_transformers(
    own: tuple[OwnQwen25Vl, str], dtype: torch.dtype, grids: list[tuple[int, int, int]]
) -> None:
    """Windows that fill the image and others, several images, and frames."""
    family, path = own
    tower, library = filled(
        family.build_vision(path, "sdpa"), LIBRARY.build_vision(path, "sdpa"), dtype
    )
    sizes = torch.tensor(grids)
    config = family.model_config(path).vision_config
    values = config.in_channels * config.temporal_patch_size * config.patch_size**2
    patches = torch.randn(int(sizes.prod(1).sum()), values).to(dtype)
    assert torch.equal(
        family.encode(tower, patches, sizes), LIBRARY.encode(library, patches, sizes)
    )


def causal(module: Any, query: Any, key: Any, value: Any, _mask: Any, **options: Any) -> Any:
    """Attend to all earlier tokens, in place of the paged cache."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options["scaling"]
    )
    return out.transpose(1, 2), module.layer_idx


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_language_model_equals_transformers(
    own: tuple[OwnQwen25Vl, str], dtype: torch.dtype
) -> None:
    family, path = own
    tied = [each.model_config(path).tie_word_embeddings for each in (family, LIBRARY)]
    assert tied[0] == tied[1]
    check_language(family, LIBRARY, path, dtype, torch.randint(0, 900, (4, 1, 40)))


def check_language(
    family: Any, library: Any, path: str, dtype: torch.dtype, positions: torch.Tensor
) -> None:
    """Check that the language model of a family has the hidden states of another's, to the bit."""
    AttentionInterface.register(CAUSAL, causal)
    own, other = (each.build_language(path, CAUSAL) for each in (family, library))
    models = filled(own, other, dtype)
    models[0].attend_by(causal)
    rows = models[0].embed_tokens(torch.arange(40)[None])
    found, expected = (
        each(inputs_embeds=rows, position_ids=positions, use_cache=False).last_hidden_state
        for each in models
    )
    assert torch.equal(found, expected), dtype
    frequencies = [each.rotary_emb.inv_freq for each in models]
    assert torch.equal(*frequencies)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["own", "qwen2_5_vl", "qwen3_vl"])
def test_positions_equal_transformers(checkpoints: Checkpoints, name: str, seed: int) -> None:
    """Of images and videos; and of videos with pruned tokens, which are those of the others without pruning."""
    path = str(checkpoints("nano3" if name == "qwen3_vl" else "nano25"))
    family = FAMILIES.get(name) or family_of_rank(NAME, path, WorkerSettings())
    drawn = np.random.default_rng(seed)
    pruned, kept, kinds = [], [np.arange(int(drawn.integers(0, 9)))], []
    grids: dict[str, list[tuple[int, int, int]]] = {"image_grid_thw": [], "video_grid_thw": []}
    intervals = []
    at = here = len(kept[0])
    kinds.append(np.zeros(at, np.int64))

    def add_text(count: int) -> None:
        nonlocal at, here
        kept.append(at + np.arange(count))
        kinds.append(np.zeros(count, np.int64))
        at, here = at + count, here + count

    for _ in range(seed % 4):
        rows, columns = (int(side) for side in drawn.integers(1, 12, 2))
        tokens = rows * columns
        grid = _GRID.pack(1, 2 * rows, 2 * columns)
        # Without text after the last video, generated tokens follow a temporal position.
        groups = int(drawn.integers(0, 6))
        intervals += [float(drawn.uniform(0.1, 9))] if groups else []
        sides = (groups or 1, 2 * rows, 2 * columns)
        grids["video_grid_thw" if groups else "image_grid_thw"].append(sides)
        for index in range(groups or 1):
            metadata = grid
            if groups and not family.writes_timestamps:
                metadata = with_time(grid, index, intervals[-1])
            some = np.flatnonzero(drawn.random(tokens) < drawn.choice([0.0, 0.5, 0.9]))
            if not index or drawn.random() < 0.3 or (family.writes_timestamps and not len(some)):
                some = np.arange(tokens)
            if len(some) == tokens:
                pruned.append(ItemPlace(here, tokens, metadata))
            elif len(some):
                ranges = tuple((row, row + 1) for row in some.tolist())
                spans = ((here, here + len(some)),)
                pruned.append(ItemPlace(here, tokens, metadata, spans, ranges))
            kept.append(at + some)
            kinds.append(np.full(tokens, 2 if groups else 1))
            here += len(some)
            at += tokens
            if family.writes_timestamps:
                add_text(int(drawn.integers(1, 5)))
        add_text(int(drawn.integers(1, 30)))
    library = FAMILIES[family.name]
    model = library._library(f"{library.library_prefix}Model")
    stand_in = SimpleNamespace(config=library.model_config(path))
    stand_in.get_vision_position_ids = functools.partial(model.get_vision_position_ids, stand_in)
    types = torch.from_numpy(np.concatenate(kinds)[None])
    given = {key: torch.tensor(value) for key, value in grids.items() if value}
    given["second_per_grid_ts"] = torch.tensor(intervals)
    unpruned, _ = model.get_rope_index(stand_in, torch.zeros_like(types), types, **given)
    expected = unpruned[:, 0].numpy()[:, np.concatenate(kept)]
    found, delta = family.positions(family.model_config(path), np.zeros(here, np.int32), pruned)
    assert np.array_equal(found, expected)
    assert delta == (expected[:, -1].max() + 1 - here if here else 0)


def older(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration in the published layout: text part at the top level, older names of entries."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text.pop("layer_types")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text.pop("model_type")
    vision = {
        name: each for name, each in config["vision_config"].items() if name != "rope_parameters"
    }
    vision["in_chans"] = vision.pop("in_channels")
    return {**text, **config, "vision_config": vision, "rope_scaling": scaling, "rope_theta": 5e5}


OLDER = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLDER |= {"original_max_position_embeddings": 128}
"""The layout of Llama 3.2, in which the rotary embedding has two entries."""
LLAMA3 = {**OLDER, "rope_theta": 500000.0}
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    ("llama", {"rope_parameters": None, "rope_scaling": OLDER, "rope_theta": 500000.0}),
    ("llama", {"rope_scaling": LLAMA3}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {"attention_bias": True}),
]


@pytest.mark.parametrize(("name", "entries"), SERVED)
def test_text_models_equal_those_of_transformers(
    configured: Configure, name: str, entries: dict[str, Any]
) -> None:
    path = configured(name, **entries)
    family = language_family(name, path, WorkerSettings())
    assert isinstance(family, OwnText)
    library = TextFamily(name, DECODERS[name])
    found, expected = family.model_config(path), library.model_config(path)
    for field in set(found.__dataclass_fields__) & set(expected.to_dict()) - {"rope_parameters"}:
        assert getattr(found, field) == getattr(expected, field), field
    for dtype in (torch.float32, torch.bfloat16):
        check_language(family, library, path, dtype, torch.randint(0, 512, (1, 40)))


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    ("name", "entries", "settings"),
    [
        (NAME, {"text_config": {"use_sliding_window": True}}, {}),
        (NAME, {"text_config": {"hidden_act": "gelu"}}, {}),
        (NAME, {"vision_config": {"hidden_act": "gelu"}}, {}),
        (NAME, {"text_config": {"rope_parameters": YARN}}, {}),
        (NAME, {"vision_config": {"window_size": None}}, {}),
        ("llama", {"rope_parameters": LINEAR}, {}),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, {}),
        ("llama", {"hidden_act": "gelu"}, {}),
        ("llama", {"num_key_value_heads": None}, {}),
        ("mistral", {"sliding_window": 128}, {}),
        ("qwen2", {"use_sliding_window": True}, {}),
        ("gemma", {}, {}),
        *((name, {}, {"attention": "exact"}) for name in (NAME, "llama")),
        *((name, {}, {"device": "cuda:0"}) for name in (NAME, "llama")),
    ],
)
def test_models_that_need_more_exact_attention_and_gpus_have_transformers_modules(
    configured: Configure, name: str, entries: dict[str, Any], settings: dict[str, Any]
) -> None:
    path = configured(name, **entries)
    family = language_family(name, path, WorkerSettings(**settings))
    assert family is None or not family.own_modules


@pytest.mark.parametrize(
    ("part", "entries"),
    [
        ("vision_config", {"depth": "x"}),
        ("vision_config", {"rope_parameters": 3}),
        ("text_config", {"rms_norm_eps": []}),
    ],
)
def test_entry_of_the_wrong_type_is_reported(
    configured: Configure, part: str, entries: dict[str, Any]
) -> None:
    path = configured(NAME, **{part: entries})
    with pytest.raises(CheckpointError, match=r"config\.json holds a value of the wrong type"):
        family_of_rank(NAME, path, WorkerSettings())
    with pytest.raises(CheckpointError, match="cannot be read as a configuration of 'qwen2_5_vl'"):
        FAMILIES[NAME].model_config(path)


RANK = """
import sys
from vsched.types import ModelInfo
from vsched.worker.contract import WorkerSettings
from vsched.worker.sizing import KvBuilder, image_for, reserve_encoder
from vsched.worker.spec import EncodeRole, StepLimits
from vsched.wire import SizeKv
from vsched_workers.plugin import plugin
for dtype in ("float32", "bfloat16"):
    info = plugin.inspect(sys.argv[1], dtype=dtype, item_tokens_max=64)
    settings = WorkerSettings(slots=4)
    assert not any("transformers" in name for name in plugin.forkable_modules(info, "cpu"))
    if info.takes_images:
        encoder = plugin.load_encoder(info, settings, lambda *_: None)
        role = EncodeRole(address="", plugin="", settings=settings, items=2, tokens=64, pixels_max=1 << 20)
        reserve_encoder(plugin, encoder, info, role)
    limits = StepLimits(slots=4, batch_tokens=64, chunk_tokens=32, context_tokens=256, block_size=16)
    image = image_for(plugin, info, limits, pixels_max=1 << 20)
    worker = plugin.load_generator(info, settings, lambda *_: None)
    sized = KvBuilder(worker, info, limits, image=image).carry_out(SizeKv(512, True, 0))
    assert sized.outcome == "fits", sized
print([name for name in ("transformers", "huggingface_hub", "torch._dynamo") if name in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("name", [NAME, "llama"])
def test_rank_imports_no_transformers(tmp_path: Path, name: str) -> None:
    """From the inspection of the checkpoint to the largest steps, so that no request waits for an import."""
    make_checkpoint(name, tmp_path)
    # Kernels may have to be compiled.
    assert printed_by(RANK, tmp_path, limit_s=5 * PATIENCE_S) == "[]\n"
