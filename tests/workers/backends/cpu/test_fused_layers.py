"""Fused layers against transformers' modules, in bfloat16 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers import driver
from tests.workers.backends.cpu.kernels.operands import draw, use_operand
from tests.workers.backends.cpu.twins import WITHIN, run_both, run_twins
from tests.workers.driver import Checkpoints, Driver, Stage, drawn_image, encode_jobs
from tests.workers.parallel.ranks import Ranks
from tests.workers.properties import thorough
from tests.workers.test_language import mixed_questions
from vsched_workers.backends.cpu import products
from vsched_workers.backends.cpu.kernels.bf16 import FLOAT32
from vsched_workers.backends.cpu.kernels.sampling import argmax
from vsched_workers.backends.cpu.language_layers import FusedLanguage
from vsched_workers.backends.cpu.products import QuantizedProduct
from vsched_workers.backends.cpu.vision_layers import FusedBlock
from vsched_workers.backends.reference.layers import ModuleLayers

Stages = Callable[..., Stage]


def test_argmax_takes_the_first_of_the_largest() -> None:
    logits = draw(6, 300)
    logits[1] = -logits[1].abs() - 1  # the bits of negative numbers are in reverse order
    logits[2, [7, 9]] = 100.0
    logits[3] = -torch.inf
    logits[4, 0] = torch.inf
    logits[5] = 0.0
    found = np.empty(6, dtype=np.int32)
    argmax(logits.data_ptr(), 6, 300, found)
    assert found.tolist() == logits.argmax(-1).tolist()
    assert found[2] == 7


@pytest.mark.parametrize("chunk", [pytest.param(5, marks=pytest.mark.slow), 48, 1000])
def test_fused_layers_equal_the_modules(stages: Stages, size: str, chunk: int) -> None:
    """Decode rows, chunks and images, including deepstack: same logits except for rounding, same choice."""
    exact, fused = (stages(size, kind, "bfloat16") for kind in ("exact", "auto"))
    assert isinstance(exact.generator._layers, ModuleLayers)  # type: ignore[attr-defined]
    assert isinstance(fused.generator._layers, FusedLanguage)  # type: ignore[attr-defined]
    options = {"chunk": chunk, "seed": chunk, "preempts": 7 * (chunk > 5)}
    run_both(exact, fused, mixed_questions(), arrivals=2, **options).check()


@pytest.mark.slow
def test_fused_layers_equal_the_modules_without_the_bfloat16_instructions(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with AVX2: weights are widened, and attention is float32. With images, too."""
    monkeypatch.setattr(products, "has_tiles", lambda: False)
    monkeypatch.setattr(products, "has_bf16_dot", lambda: False)
    use_operand(monkeypatch, FLOAT32)
    exact, fused = _exact_and_fused(checkpoints("tiny25"))
    assert isinstance(fused.generator._head, QuantizedProduct)  # type: ignore[attr-defined]
    run_both(exact, fused, mixed_questions(), chunk=300, seed=1, arrivals=2).check()
    _check_images(exact, fused, [(90, 60), (448, 448)])


def _exact_and_fused(checkpoint: Path) -> list[Stage]:
    kinds = ("exact", "auto")
    return [Stage.load(checkpoint, attention=kind, dtype="bfloat16") for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["nano25", *thorough("nano3")])
def test_fused_layers_equal_the_modules_on_two_ranks(
    checkpoints: Checkpoints, ranks: Ranks, size: str
) -> None:
    """Each rank merges the projections of its own heads, and the sum over ranks is the same on both."""
    first, second = ranks.run(run_twins, str(checkpoints(size)), mixed_questions())
    assert first == second
    assert len(first) > 40


def test_packed_weights_are_no_second_copy(stages: Stages, size: str) -> None:
    fused: Any = stages(size, "auto", "bfloat16").generator
    assert not any("proj" in name for name, _ in fused.module.named_parameters())
    exact = stages(size, "exact", "bfloat16").generator
    head = fused._head
    assert fused.weights_bytes < 1.3 * exact.weights_bytes + head.size_bytes


def test_profiling_run_of_first_layers_computes_every_row(stages: Stages, size: str) -> None:
    """The last layer computes only wanted rows; a profiling run without that layer must compute all."""
    generator: Any = stages(size, "auto", "bfloat16").generator
    driver = Driver(stages(size, "auto", "bfloat16"), chunk=30)
    rows: list[int] = []
    layer = generator._layers._layers[0]
    down = layer.down

    def watch(given: torch.Tensor) -> torch.Tensor:
        rows.append(len(given))
        product: torch.Tensor = down(given)
        return product

    layer.down = watch
    try:
        with generator.first_layers(1):
            driver.step([driver.start(0, mixed_questions()[1])])
    finally:
        layer.down = down
    assert rows == [30]


@pytest.mark.parametrize("sizes", [[(90, 60)], [(200, 70), (31, 150), (140, 140)]])
def test_fused_blocks_equal_the_modules(stages: Stages, sizes: list[tuple[int, int]]) -> None:
    """Windows of several sizes, one or more images at once: same rows except for rounding."""
    exact, fused = (stages("nano25", kind, "bfloat16") for kind in ("exact", "auto"))
    assert _fused_blocks(fused)
    _check_images(exact, fused, sizes)


def _check_images(exact: Stage, fused: Stage, sizes: list[tuple[int, int]]) -> None:
    """Encode images with both, and compare their rows."""
    images = [drawn_image(seed, *size) for seed, size in enumerate(sizes)]
    jobs = encode_jobs(exact.preprocessor, images, last_page=driver.PAGES - 1)
    rows = []
    for stage in (exact, fused):
        shape = (driver.PAGES, driver.ROWS_A_PAGE, exact.info.embedding_row_bytes)
        arena = np.zeros(shape, dtype=np.uint8)
        stage.encoder.encode(jobs, arena)
        rows.append(torch.from_numpy(arena).view(torch.bfloat16).float())
    assert rows[0].abs().max() > 0.1
    assert (rows[0] - rows[1]).abs().max() < WITHIN * rows[0].abs().max()


def _fused_blocks(stage: Stage) -> bool:
    blocks = stage.encoder._tower.module.blocks  # type: ignore[attr-defined]
    return all(isinstance(block, FusedBlock) for block in blocks)
