"""The encode worker, also on the generic path, compared with the vision tower of transformers' whole model."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from transformers import AutoConfig, Qwen3VLVisionModel

from tests.parity.vision_architectures import (
    VISION_ARCHITECTURES,
    images_of,
    make_model,
    save_model,
)
from tests.parity.vision_checkpoints import make_vision_checkpoint
from tests.workers.driver import (
    ROWS_A_PAGE,
    Checkpoints,
    Stage,
    Stages,
    drawn_image,
    encode_jobs,
    inspect,
    load_encoder,
    unreported,
    values_of,
)
from tests.workers.properties import usually
from tests.workers.reference import Reference
from vsched.errors import CheckpointError
from vsched.types import ModelInfo
from vsched.worker.contract import EncodeJob, WorkerSettings
from vsched.worker.sizing import BatchArena
from vsched_workers import vision
from vsched_workers.backends.cpu import attention, tower_attention, vision_layers
from vsched_workers.backends.cpu.attention import attend_patches
from vsched_workers.backends.cpu.backend import CpuBackend
from vsched_workers.backends.reference.any_tower import AnyTower
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.batching import pause_points
from vsched_workers.checkpoint.whole_model import build_tower, load_whole
from vsched_workers.families import FAMILIES
from vsched_workers.families.qwen_image import grid_of
from vsched_workers.memory.sparse_runs import sparsely
from vsched_workers.plugin import plugin
from vsched_workers.vision import FamilyTower

IMAGES = [drawn_image(1, 90, 60), drawn_image(2, 200, 70), drawn_image(3, 33, 33)]


def jobs_of(stage: Stage) -> list[EncodeJob]:
    return encode_jobs(stage.preprocessor, IMAGES, last_page=100)


def empty_pages(info: ModelInfo) -> npt.NDArray[np.uint8]:
    return np.full((101, ROWS_A_PAGE, info.embedding_row_bytes), 0xA5, dtype=np.uint8)


@pytest.mark.parametrize("size", ["nano25", "nano3"])
def test_encode_equals_the_whole_model(
    stages: Stages, references: Callable[[str], Reference], size: str
) -> None:
    """Rows and all deepstack levels, several images in a call; nothing else is written."""
    stage = stages(size)
    jobs = jobs_of(stage)
    embeddings = empty_pages(stage.info)
    load_encoder(stage.info, WorkerSettings(attention="exact")).encode(jobs, embeddings)
    model = references(size).model.model
    with torch.inference_mode():
        out = model.get_image_features(
            values_of([job.arrays for job in jobs]),
            torch.tensor([grid_of(job.metadata) for job in jobs]),
            return_dict=True,
        )
    for index, job in enumerate(jobs):
        raw = embeddings[list(job.pages)].reshape(-1, stage.info.embedding_row_bytes)[: job.tokens]
        rows = raw.view(np.float32).reshape(job.tokens, -1, stage.info.hidden_size)
        deepstack = getattr(out, "deepstack_features", ())
        wanted = [out.pooler_output[index], *(level[index] for level in deepstack)]
        assert rows.shape[1] == len(wanted)
        for level, tensor in enumerate(wanted):
            np.testing.assert_allclose(rows[:, level], tensor.numpy(), rtol=1e-4, atol=1e-5)
        if rest := job.tokens % ROWS_A_PAGE:
            assert (embeddings[job.pages[-1], rest:] == 0xA5).all(), "the page is partly filled"
    written = [page for job in jobs for page in job.pages]
    assert (np.delete(embeddings, written, axis=0) == 0xA5).all()


def test_encode_pauses_within_blocks_of_large_images(
    stages: Stages, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between products, and between heads of attention; a layer of thousands of patches takes seconds."""
    monkeypatch.setattr(pause_points, "PIECE_OPERATIONS", 1.0)
    stage = stages(size, "auto", "bfloat16")
    jobs, whole, found = jobs_of(stage), empty_pages(stage.info), empty_pages(stage.info)
    stage.encoder.encode(jobs, whole)
    stage.encoder.begin(jobs, found)
    pauses = 1
    while not stage.encoder.advance(1):
        pauses += 1
    assert pauses > 8 * len(stage.encoder._tower.layers)  # type: ignore[attr-defined]
    assert np.array_equal(found, whole)


@pytest.mark.parametrize(
    ("attention", "layers"), [("auto", 1), ("exact", 1), ("auto", 2), ("exact", 0)]
)
def test_encode_pauses_between_blocks(
    stages: Stages, size: str, attention: str, layers: int
) -> None:
    """Bit-identical rows, written at the end; between slices the thread is not in inference mode."""
    stage = stages(size)
    settings = WorkerSettings(attention=attention)
    worker = load_encoder(stage.info, settings)
    assert worker.pauses
    jobs = jobs_of(stage)
    whole, found = empty_pages(stage.info), empty_pages(stage.info)
    worker.encode(jobs, whole)
    worker.begin(jobs, found)
    pauses = 0
    while not worker.advance(layers):
        pauses += 1
        assert not torch.is_inference_mode_enabled()
        assert (found == 0xA5).all()
        assert torch.ones(1, requires_grad=True).requires_grad, "what runs meanwhile is free"
    assert np.array_equal(found, whole)
    blocks = len(worker._tower.layers)
    assert pauses == ((blocks - 1) // layers if layers else 0)


class BehindBackend(Backend):
    """A device that runs behind the host, so that an encoder does not pause between layers."""

    synchronous = False


def test_encode_without_pauses_needs_no_greenlets(
    checkpoints: Checkpoints, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With GPUs, greenlet may not be installed: the module that needs it is not even imported."""
    jobs, expected = jobs_of(stages("nano25")), empty_pages(stages("nano25").info)
    stages("nano25").encoder.encode(jobs, expected)
    monkeypatch.setattr(vision, "choose_backend", BehindBackend)
    monkeypatch.setitem(sys.modules, "vsched_workers.batching.sliced_run", None)
    stage = Stage.load(checkpoints("nano25"))
    assert not stage.encoder.pauses
    found = empty_pages(stage.info)
    stage.encoder.encode(jobs, found)
    assert np.array_equal(found, expected)


def test_encode_that_fails_within_a_batch_takes_the_next(stages: Stages) -> None:
    """The error is raised by the failing layer; an abandoned batch leaves nothing behind."""
    stage = stages("nano25")
    worker = load_encoder(stage.info)
    assert worker.pauses
    jobs = jobs_of(stage)
    wrong = replace(jobs[0], tokens=jobs[0].tokens - 1)
    worker.begin([wrong], empty_pages(stage.info))
    assert not worker.advance(1)
    with pytest.raises(ValueError, match="the encoder yields rows of shape"):
        worker.advance(0)
    left = empty_pages(stage.info)
    gone = weakref.ref(left)
    worker.begin(jobs[1:], left)
    del left
    assert not worker.advance(1)
    found, whole = empty_pages(stage.info), empty_pages(stage.info)
    worker.begin(jobs[:1], found)
    gc.collect()
    assert gone() is None, "what was left of the other batch is given back"
    assert worker.advance(0)
    worker.encode(jobs[:1], whole)
    assert np.array_equal(found, whole)
    assert not torch.is_inference_mode_enabled()


SAMPLE = ("idefics3", "internvl", "llava_onevision", "mistral3", "qwen3_omni_moe_thinker")
"""Crops in a separate dimension or in the first one, several resolutions, any size, deepstack."""


FUSED_MLPS = ("idefics3", "internvl", "llava_onevision", "qwen3_omni_moe_thinker")
"""Two linear layers with GELU between them; the others have a gate."""


def load_tower(path: Path, family: str) -> AnyTower:
    model = load_whole(
        build_tower(str(path), family),
        str(path),
        dtype=torch.float32,
        device="cpu",
        progress=unreported,
    )
    return AnyTower(model, torch.float32)


@pytest.mark.parametrize("name", usually("internvl", "qwen3_omni_moe_thinker", of=SAMPLE))
@torch.inference_mode()
def test_tower_alone_gives_the_rows_of_the_whole_model(tmp_path: Path, name: str) -> None:
    """Bit-identical; further levels of a token are next to its first."""
    save_model(name, tmp_path)
    alone = load_tower(tmp_path, VISION_ARCHITECTURES[name].family or name)
    model = make_model(name)
    for image in images_of(name):
        found = alone(image)
        assert torch.equal(found, AnyTower(model, torch.float32)(image))
        assert found.std() > 0.5
    if name == "qwen3_omni_moe_thinker":
        grid = torch.from_numpy(image["image_grid_thw"])
        out = model.get_image_features(torch.from_numpy(image["pixel_values"]), grid)
        levels = [out.pooler_output[0], *(level[0] for level in out.deepstack_features)]
        assert torch.equal(found, torch.cat(levels, dim=-1))


def test_a_model_without_features_of_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "git", "image_token_id": 3}')
    with pytest.raises(CheckpointError, match="no features of images"):
        build_tower(str(tmp_path), "git")


@pytest.mark.parametrize("name", usually("internvl", of=SAMPLE))
@torch.inference_mode()
def test_prepared_towers_give_the_rows_of_those_that_are_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, within its precision; torch takes 30 times as long for convolutions in it, twice for attention."""
    attend, run = Mock(wraps=attend_patches), Mock(wraps=vision_layers._run_mlp)
    monkeypatch.setattr(tower_attention, "attend_patches", attend)
    monkeypatch.setattr(vision_layers, "_run_mlp", run)
    (image, *_) = images_of(name)
    plain = AnyTower(make_model(name).to(torch.bfloat16), torch.bfloat16)(image)
    backend = CpuBackend(WorkerSettings(), torch.bfloat16)
    model = make_model(name).to(torch.bfloat16)
    assert backend.prepare_any_tower(model) > 0
    run.reset_mock()
    left = [each for each in model.modules() if isinstance(each, nn.Conv2d | nn.Conv3d)]
    assert all(each.kernel_size != each.stride for each in left), "audio alone"
    packed = AnyTower(model, torch.bfloat16)(image)
    scale = plain.float().std().item()
    assert (packed.float() - plain.float()).abs().max().item() < 0.05 * scale
    attend.assert_called()
    assert bool(run.call_count) == (name in FUSED_MLPS)


def test_sparse_runs_leave_out_layers_in_the_middle() -> None:
    """The last one computes while the results of the others are held."""
    vision = {**VISION_ARCHITECTURES["llava"].vision, "num_hidden_layers": 9}
    tower = AnyTower(make_model("llava", vision_config=vision), torch.float32)
    computed: list[int] = []
    for index, layer in enumerate(tower.layers):
        attention: Any = layer.self_attn
        attention.register_forward_hook(lambda *_, index=index: computed.append(index))
    with torch.inference_mode(), sparsely():
        assert tower(images_of("llava")[0]).isfinite().all()
    assert computed == [0, 1, 8]


def test_blocks_of_heads_that_are_no_whole_vectors_are_fused_and_left_out_of_sparse_runs(
    checkpoints: Checkpoints, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Qwen3-VL have 72 values: its largest image took minutes of a start."""
    config: Any = AutoConfig.from_pretrained(checkpoints("nano3")).vision_config
    config.depth, config.hidden_size = 9, 48
    model: Any = Qwen3VLVisionModel._from_config(config).to(torch.bfloat16)
    jobs, family, found = jobs_of(stages("nano3")), FAMILIES["qwen3_vl"], []
    attend = Mock(wraps=attend_patches)
    monkeypatch.setattr(attention, "attend_patches", attend)
    for backend in (Backend, CpuBackend):
        made = backend(WorkerSettings(), torch.bfloat16)
        made.prepare_tower(model)
        tower = FamilyTower(family, model, made, 2)
        with torch.inference_mode():
            found.append(tower.encode(jobs).float())
    assert (found[1] - found[0]).abs().max().item() < 0.1 * found[0].std().item()
    assert attend.call_count == 9 * len(jobs)
    with torch.inference_mode(), sparsely():
        assert tower.encode(jobs).isfinite().all()
    assert attend.call_count == (9 + 3) * len(jobs)


@pytest.fixture(scope="module")
def crops(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    """Return the properties of a checkpoint with images of a variable number of crops."""
    path = tmp_path_factory.mktemp("served")
    make_vision_checkpoint("internvl", path, weights=False)
    return inspect(path)


def test_forked_ranks_have_the_modules_of_all_parts(crops: ModelInfo) -> None:
    modules = plugin.forkable_modules(crops, "cpu")
    own = [name.rpartition(".")[2] for name in modules if name.startswith("transformers.")]
    assert own == ["modeling_internvl", "modeling_qwen2"]
    for name in modules:
        importlib.import_module(name)


def test_worst_batch_is_a_real_image_of_the_most_tokens(crops: ModelInfo) -> None:
    """Its arrays can be encoded, including masks; and it can be taken once."""
    batches = plugin.worst_batches(crops, items=4, tokens=64, pixels_max=1 << 20)
    plans = [plan for batch in batches for plan in batch]
    assert max(plan.tokens for plan in plans) == crops.item_tokens_max == 28
    for plan in plans:
        arrays = plugin.sample_arrays(crops, plan)
        assert {spec.name: spec.shape for spec in plan.arrays} == {
            name: array.shape for name, array in arrays.items()
        }
        assert arrays["pixel_values"].std() > 0.1
        assert not plugin.sample_arrays(crops, plan)
    small = plugin.worst_batches(crops, items=4, tokens=64, pixels_max=64 * 64)
    assert max(plan.tokens for batch in small for plan in batch) < 28


@pytest.mark.parametrize("name", usually("idefics3", of=["gemma3", "llava_onevision"]))
def test_reservation_encodes_the_worst_image(tmp_path: Path, name: str) -> None:
    """The model skips crops of padding alone: zeros would have reserved too little."""
    make_vision_checkpoint(name, tmp_path)
    info = inspect(tmp_path)
    worker = load_encoder(info)
    batches = plugin.worst_batches(info, items=2, tokens=0, pixels_max=1 << 18)
    arena = BatchArena(info, batches, plugin.sample_arrays)
    for batch in arena.batches:
        worker.encode(arena.jobs(batch), arena.embeddings)
        rows = arena.embeddings.reshape(-1, info.embedding_row_bytes)[: batch[0].tokens]
        assert np.isfinite(rows.view(np.float32)).all()
        assert rows.view(np.float32).any(axis=1).all()
