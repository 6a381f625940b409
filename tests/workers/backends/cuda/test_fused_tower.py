"""Fused towers of a GPU compared with transformers' modules, with kernels in Triton's interpreter or on a device.

Attention in one call per layer is tested with torch's kernel written out on the CPU.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.workers.backends.cuda.on_host import DEVICE, backend_here
from tests.workers.backends.cuda.races import check_not_used
from tests.workers.backends.cuda.test_attention_trials import varlen_on_cpu
from tests.workers.driver import Checkpoints, Driver, Question, Stage, Stages, drawn_image
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cuda import attention_trials, fused_tower, products
from vsched_workers.backends.cuda.attention_trials import usable_kernels
from vsched_workers.backends.cuda.device import VARIABLE
from vsched_workers.backends.cuda.fused_tower import INNER_MULTIPLE, FusedTower, VisionKernels, fits
from vsched_workers.families import FAMILIES, family_of_rank

pytestmark = pytest.mark.filterwarnings("default")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

INNER = 27
"""Not aligned, in any type."""

GRIDS = [(1, 10, 14), (2, 2, 4), (1, 4, 6)]
"""An image with parts of windows, two frames, and an image smaller than a window."""

SIZES = {"hidden_size": 32, "intermediate_size": INNER, "depth": 2, "num_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"out_hidden_size": 24, "fullatt_block_indexes": [1], "window_size": 112},
    "qwen3_vl": {
        "out_hidden_size": 24,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    },
}
LAST = {"qwen2_5_vl": "down_proj.weight", "qwen3_vl": "linear_fc2.weight"}


class Encoded:
    """A tower of a family, with random weights, and patches of images."""

    def __init__(self, name: str, folder: Path) -> None:
        config = {"model_type": name, "vision_config": SIZES | CONFIGS[name], "text_config": {}}
        (folder / "config.json").write_text(json.dumps(config))
        self.family = FAMILIES[name]
        backend_here()  # convolutions in float32, not TF32, from now on
        torch.manual_seed(0)
        tower: Any = self.family.build_vision(str(folder), "sdpa")
        for each in tower.parameters():
            each.data.normal_(std=0.3 if each.dim() > 1 else 1.0)
        self.tower = tower.eval().requires_grad_(requires_grad=False).to(DEVICE)
        values = tower.patch_embed.proj.weight[0].numel()
        self.grids = torch.tensor(GRIDS)
        self.patches = torch.randn(int(self.grids.prod(1).sum()), values).to(DEVICE)
        self.wanted = self.rows(self.tower, self.grids.to(DEVICE))

    @torch.inference_mode()
    def rows(self, tower: nn.Module, grids: torch.Tensor | None = None) -> torch.Tensor:
        return self.family.encode(tower, self.patches, self.grids if grids is None else grids)

    def check(self, tower: nn.Module) -> None:
        """Check the rows of a prepared tower, which takes grids on the host."""
        torch.testing.assert_close(
            self.rows(tower), self.wanted, rtol=1e-4, atol=1e-4 * float(self.wanted.abs().max())
        )


@pytest.fixture(params=CONFIGS)
def encoded(request: pytest.FixtureRequest, tmp_path: Path) -> Encoded:
    return Encoded(request.param, tmp_path)


def prepared(tower: nn.Module, **given: Any) -> Any:
    """Return a copy of a tower, prepared by the CUDA backend on this machine's device or on the host."""
    tower = copy.deepcopy(tower)
    assert backend_here(**given).prepare_tower(tower) > 0
    return tower


@needs_triton
@pytest.mark.slow
def test_fused_towers_equal_the_modules(encoded: Encoded) -> None:
    """Windows and whole images, more than one frame, deepstack and position embeddings; MLPs are padded."""
    tower = prepared(encoded.tower)
    assert isinstance(tower.forward, FusedTower)
    encoded.check(tower)


@torch.inference_mode()
def test_windows_of_any_size_take_one_compiled_kernel(encoded: Encoded) -> None:
    """A small image compiles nothing while requests wait."""
    rows = []

    class Noted:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **constants: rows.append(constants.get("ROWS"))

    fused_tower.merge(encoded.tower)
    kernels = VisionKernels(*[Noted()] * len(VisionKernels._fields))
    tower = FusedTower(encoded.tower, kernels, flash=False)
    for grid in ([1, 2, 2], [1, 2, 8], [1, 8, 8]):
        patches = torch.randn(grid[1] * grid[2], encoded.patches.shape[1]).to(DEVICE)
        tower(patches, grid_thw=torch.tensor([grid]))
    assert {each for each in rows if each} == {fused_tower.WINDOW_MAX}


@needs_triton
@pytest.mark.slow
def test_long_sequences_attend_in_one_call(
    encoded: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(packed: Any, ends: torch.Tensor, longest: int, scaling: float) -> torch.Tensor:
        calls.append((len(ends) - 1, longest))
        query, key, value = packed
        return varlen_on_cpu(
            query, key, value, ends, ends, longest, longest, scale=scaling, enable_gqa=True
        )

    tower = prepared(encoded.tower)
    tower.forward._flash = True
    monkeypatch.setattr(fused_tower, "varlen", counted)
    encoded.check(tower)
    blocks = 1 if encoded.family.name == "qwen2_5_vl" else SIZES["depth"]
    assert calls == [(4, 10 * 14)] * blocks, "windows have a kernel of their own"


@needs_triton
@pytest.mark.slow
@pytest.mark.usefixtures("properties")
def test_quantized_towers_are_fused(encoded: Encoded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merged product has the weights of its parts; groups of inputs are not padded."""
    monkeypatch.setattr(products, "FEW_ROWS_MAX", 0)
    fused = prepared(encoded.tower, weights="int8")
    assert isinstance(fused.forward, FusedTower)
    monkeypatch.setattr(attention_trials, "load_kernels", lambda _: None)
    encoded.wanted = encoded.rows(prepared(encoded.tower, weights="int8"))
    encoded.check(fused)


@pytest.mark.parametrize(
    ("adapters", "off", "inner"), [(0, "", INNER_MULTIPLE), (1, "", INNER), (0, "tower", INNER)]
)
def test_modules_without_triton_are_padded_and_with_adapters_or_turned_off_keep_their_sizes(
    encoded: Encoded, monkeypatch: pytest.MonkeyPatch, adapters: int, off: str, inner: int
) -> None:
    if inner == INNER_MULTIPLE:
        monkeypatch.setattr(attention_trials, "load_kernels", lambda _: None)
    monkeypatch.setenv(VARIABLE, off)
    tower = prepared(encoded.tower, adapters=adapters)
    assert not isinstance(tower.forward, FusedTower)
    for block in tower.blocks:
        assert inner in {*block.mlp.state_dict()[LAST[encoded.family.name]].shape}
    encoded.check(tower)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("broken", VisionKernels._fields)
def test_kernels_that_are_wrong_or_do_not_run_are_not_used(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def usable() -> VisionKernels | None:
        return usable_kernels(
            VisionKernels, fused_tower.trial, torch.float32, DEVICE, what="fused vision tower"
        )

    check_not_used(usable, VisionKernels, broken, monkeypatch, caplog)


def test_other_towers_are_not_fused(encoded: Encoded, checkpoints: Checkpoints) -> None:
    """Towers of vsched's own modules, for CPUs, take other arguments."""
    assert fits(encoded.tower)
    assert not fits(nn.Module())
    path = str(checkpoints("nano25"))
    own = family_of_rank("qwen2_5_vl", path, WorkerSettings())
    assert not fits(own.build_vision(path, "sdpa"))
    encoded.tower.blocks[1].norm2 = nn.Identity()
    assert not fits(encoded.tower)


def test_flash_gives_the_rows_of_attention_window_by_window(
    stages: Stages, checkpoints: Checkpoints, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import varlen

    plain = stages(size)  # shared by all tests: loaded before anything is replaced
    calls = []

    def counted(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append(len(inputs[3]) - 1)
        return varlen_on_cpu(*inputs, **options)  # type: ignore[arg-type]

    counted.__signature__ = inspect.signature(varlen_on_cpu)  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "varlen_attn", counted)
    flash = Stage.load(checkpoints(size))
    fused_tower.switch(flash.encoder._tower.module)  # type: ignore[attr-defined]
    question = Question("Compare.", [drawn_image(2, 200, 70), drawn_image(4, 31, 150)])
    rows = []
    for stage in (plain, flash):
        driver = Driver(stage, chunk=64)
        driver.start(0, question)
        rows.append(driver.embeddings.view(np.float32))
    assert np.abs(rows[0] - rows[1]).max() < 1e-5
    assert len(calls) == len(flash.encoder._tower.module.blocks)  # type: ignore[attr-defined]
    assert min(calls) >= 2, "both images, and where there are windows all of them, in one call"


def test_flash_is_for_gpus_and_16_bit_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_tower, "runs", lambda *_: True)
    for settings, dtype, name in [
        (WorkerSettings(), torch.bfloat16, "sdpa"),
        (WorkerSettings(device="cuda"), torch.float32, "sdpa"),
        (WorkerSettings(device="cuda", attention="exact"), torch.bfloat16, "sdpa"),
        (WorkerSettings(device="cuda"), torch.bfloat16, fused_tower.FLASH),
    ]:
        tower: Any = nn.Module()
        tower.config, tower.blocks = SimpleNamespace(_attn_implementation="sdpa"), []
        choose_backend(settings, dtype).prepare_tower(tower)
        assert tower.config._attn_implementation == name


def test_flash_is_not_taken_where_it_does_not_run() -> None:
    """Torch's own kernel does not run on a CPU, which the trial detects."""
    assert not fused_tower.runs("cpu", torch.bfloat16)
