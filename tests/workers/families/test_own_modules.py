"""Modules of Qwen2.5-VL without transformers: bit-identical results; properties of models on the generic path."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface

from tests.patience import PATIENCE_S
from tests.programs import printed_by
from tests.workers.driver import Checkpoints
from vsched.errors import CheckpointError
from vsched.types import ItemPlace
from vsched.worker.contract import WorkerSettings
from vsched_workers.families import FAMILIES, OwnQwen25Vl, family_of_rank
from vsched_workers.families.generic import vision_facts
from vsched_workers.families.qwen_image import _GRID, with_time

NAME = "qwen2_5_vl"
LIBRARY = FAMILIES[NAME]
CAUSAL = "causal attention of this test"


@pytest.fixture
def own(checkpoints: Checkpoints) -> tuple[OwnQwen25Vl, str]:
    """Return the family with vsched's own modules for the smallest checkpoint, and its path."""
    path = str(checkpoints("nano25"))
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
    AttentionInterface.register(CAUSAL, causal)
    model, library = filled(
        family.build_language(path, CAUSAL), LIBRARY.build_language(path, CAUSAL), dtype
    )
    model.attend_by(causal)
    token_ids = torch.arange(40)[None]
    given: dict[str, Any] = {"position_ids": torch.randint(0, 900, (4, 1, 40)), "use_cache": False}
    found, expected = (
        each(inputs_embeds=each.embed_tokens(token_ids), **given).last_hidden_state
        for each in (model, library)
    )
    assert torch.equal(found, expected)


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
    model = library._library("modeling", f"{library.library_prefix}Model")
    stand_in = SimpleNamespace(config=library.model_config(path))
    stand_in.get_vision_position_ids = functools.partial(model.get_vision_position_ids, stand_in)
    types = torch.from_numpy(np.concatenate(kinds)[None])
    given = {key: torch.tensor(value) for key, value in grids.items() if value}
    unpruned, _ = model.get_rope_index(
        stand_in,
        torch.zeros_like(types),
        types,
        second_per_grid_ts=torch.tensor(intervals),
        **given,
    )
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


@pytest.mark.parametrize("rewritten", [lambda config: config, older])
def test_settings_equal_transformers(
    checkpoints: Checkpoints, tmp_path: Path, rewritten: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    config = rewritten(json.loads((checkpoints("nano25") / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    family = family_of_rank(NAME, str(tmp_path), WorkerSettings())
    assert isinstance(family, OwnQwen25Vl)
    found, library = family.model_config(""), LIBRARY.model_config(str(tmp_path))
    assert found.tie_word_embeddings == library.tie_word_embeddings
    for part, expected in (
        (found.text_config, library.text_config),
        (found.vision_config, library.vision_config),
    ):
        names = {*part.__dataclass_fields__} & {*expected.to_dict()}
        names -= {"rope_parameters", "tie_word_embeddings"}
        assert names
        for name in names:
            stated = getattr(expected, name)
            assert getattr(part, name) == (tuple(stated) if isinstance(stated, list) else stated)
    assert found.vision_config.rope_theta == library.vision_config.rope_parameters["rope_theta"]
    rope = library.text_config.rope_parameters
    assert dict(found.text_config.rope_parameters) == {
        name: rope[name] for name in ("rope_type", "rope_theta", "mrope_section")
    }


@pytest.mark.parametrize(
    ("part", "entries"),
    [
        ("text_config", {"use_sliding_window": True}),
        ("text_config", {"hidden_act": "gelu"}),
        ("vision_config", {"hidden_act": "gelu"}),
        (
            "text_config",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mrope_section": [2, 3, 3]}},
        ),
        ("vision_config", {"window_size": None}),
    ],
)
def test_checkpoint_that_requests_more_has_transformers_modules(
    checkpoints: Checkpoints, tmp_path: Path, part: str, entries: dict[str, Any]
) -> None:
    config = json.loads((checkpoints("nano25") / "config.json").read_text())
    config[part] |= entries
    config[part] = {name: each for name, each in config[part].items() if each is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert family_of_rank(NAME, str(tmp_path), WorkerSettings()) is LIBRARY


@pytest.mark.parametrize(
    ("part", "entries"),
    [
        ("vision_config", {"depth": "x"}),
        ("vision_config", {"rope_parameters": 3}),
        ("text_config", {"rms_norm_eps": []}),
    ],
)
def test_entry_of_the_wrong_type_is_reported(
    checkpoints: Checkpoints, tmp_path: Path, part: str, entries: dict[str, Any]
) -> None:
    config = json.loads((checkpoints("nano25") / "config.json").read_text())
    config[part] |= entries
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json holds a value of the wrong type"):
        family_of_rank(NAME, str(tmp_path), WorkerSettings())


@pytest.mark.parametrize("settings", [WorkerSettings(attention="exact"), WorkerSettings("cuda:0")])
def test_exact_attention_and_gpus_have_transformers_modules(
    checkpoints: Checkpoints, settings: WorkerSettings
) -> None:
    assert family_of_rank(NAME, str(checkpoints("nano25")), settings) is LIBRARY


RANK = """
import sys
from vsched.types import ModelInfo
from vsched.worker.contract import WorkerSettings
from vsched.worker.sizing import KvBuilder
from vsched.worker.sizing import image_for
from vsched.worker.spec import StepLimits
from vsched.worker.sizing import reserve_encoder
from vsched.worker.spec import EncodeRole
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
def test_rank_imports_no_transformers(checkpoints: Checkpoints) -> None:
    """From loading to the largest steps, so that no request waits for an import."""
    # Kernels may have to be compiled.
    assert printed_by(RANK, checkpoints("nano25"), limit_s=5 * PATIENCE_S) == "[]\n"


def write_config(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mllama"}, "attend to images apart from the text"),
        ({"model_type": "florence2"}, "an encoder for text"),
        (
            {"model_type": "llava", "text_config": {"model_type": "deepseek_v32"}},
            "indexed_attention",
        ),
        ({"model_type": "llama4"}, "temperatures"),
        ({"model_type": "perception_lm", "image_token_id": 3}, "package timm"),
    ],
)
def test_unsupported_configurations_are_refused_with_the_reason(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    family = config["model_type"]
    with pytest.raises(CheckpointError, match=f"'{family}' has .*{reason}"):
        vision_facts(write_config(tmp_path, **config), family)
