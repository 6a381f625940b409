"""Fused layers against transformers' modules, in bfloat16 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers import driver
from tests.workers.backends.cpu.kernels.operands import bits, draw, use_operand
from tests.workers.backends.cpu.twins import WITHIN, Twins, run_twins
from tests.workers.driver import Checkpoints, Driver, Stage, drawn_image, encode_jobs
from tests.workers.parallel.ranks import Ranks
from tests.workers.test_language import mixed_questions
from vsched_workers.backends.cpu import products
from vsched_workers.backends.cpu.kernels.bf16 import FLOAT32
from vsched_workers.backends.cpu.kernels.norm import add_norm
from vsched_workers.backends.cpu.kernels.rope import RopeRows, heads_of, rope_prefill
from vsched_workers.backends.cpu.kernels.sampling import argmax
from vsched_workers.backends.cpu.language_layers import FusedLanguage
from vsched_workers.backends.cpu.products import QuantizedProduct
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.backends.cpu.vision_layers import FusedBlock
from vsched_workers.backends.reference.layers import AxesAngles, ModuleLayers

Stages = Callable[..., Stage]
EPS = 1e-6
ROWS = [(1, 5), pytest.param(2, 3000, marks=pytest.mark.slow)]
"""Numbers of threads, with enough rows for each."""


def normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm of rows by transformers' module."""
    single = rows.float()
    return weight * (single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + EPS)).bfloat16()


def rotated(head: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = head.chunk(2, dim=-1)
    half = torch.cat([-second, first], dim=-1)
    return head * torch.cat([cos, cos], dim=-1) + half * torch.cat([sin, sin], dim=-1)


@pytest.mark.parametrize(("threads", "rows"), ROWS)
@pytest.mark.parametrize("width", [16, 40, 257])
@pytest.mark.parametrize("adds", ["adds", "adds nothing"])
def test_add_norm_equals_the_modules(threads: int, rows: int, width: int, adds: str) -> None:
    hidden, delta, weight = draw(rows, width), draw(rows, width, seed=1), draw(width, seed=2)
    wanted = hidden + delta if adds == "adds" else hidden.clone()
    out = torch.empty_like(hidden)
    delta_at = delta.data_ptr() if adds == "adds" else 0
    add_norm(
        pool_of(threads),
        hidden.data_ptr(),
        delta_at,
        weight.data_ptr(),
        width,
        np.float32(EPS),
        out.data_ptr(),
        rows,
    )
    assert torch.equal(hidden, wanted)
    # Another order of sums may round a value to the neighbouring one.
    assert (out == normed(wanted, weight)).float().mean() > 0.99
    torch.testing.assert_close(out, normed(wanted, weight), rtol=0.01, atol=0.0)


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


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(("threads", "rows"), ROWS)
def test_rope_equals_the_modules(threads: int, rows: int, has_norms: bool) -> None:
    """Heads are normed and rotated as by the modules, and keys and values are in their cache slots."""
    heads, kv_heads, dim = 4, 2, 16
    qkv, cos, sin = draw(rows, (heads + 2 * kv_heads) * dim), draw(rows, 8), draw(rows, 8, seed=1)
    weights = [draw(dim, seed=seed) for seed in (2, 3)]
    norms = [weight.data_ptr() if has_norms else 0 for weight in weights]
    keys, values = (torch.zeros(4 * rows, kv_heads, dim, dtype=torch.bfloat16) for _ in range(2))
    room = torch.zeros(heads + 2 * kv_heads, rows + 3, dim, dtype=torch.bfloat16)
    slots = np.random.default_rng(0).permutation(4 * rows)[:rows]
    rope_prefill(
        pool_of(threads),
        qkv.data_ptr(),
        room[:, 2:].data_ptr(),
        rows + 3,
        heads_of(heads, norms[0], norms[1], EPS, 1.0),
        RopeRows(bits(cos), bits(sin), slots),
        *map(bits, (keys, values)),
    )
    split = qkv.view(rows, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if has_norms:
        split = (normed(split[0], weights[0]), normed(split[1], weights[1]), split[2])
    wanted = [*(rotated(each, cos[:, None], sin[:, None]) for each in split[:2]), split[2]]
    found = room[:, 2 : 2 + rows].transpose(0, 1).split([heads, kv_heads, kv_heads], dim=1)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.01)
    assert not room[:, :2].any()
    assert not room[:, 2 + rows :].any()
    assert torch.equal(keys[slots], found[1])
    assert torch.equal(values[slots], found[2])
    assert keys.any(-1).any(-1).sum() == rows


def test_angles_equal_the_modules(stages: Stages, size: str) -> None:
    """Each frequency belongs to the axis that the family assigns, for either kind of interleaving."""
    rotary = stages(size, "auto", "bfloat16").generator.module.rotary_emb  # type: ignore[attr-defined]
    positions = torch.randint(0, 30000, (4, 1, 50), generator=torch.Generator().manual_seed(0))
    cos, sin = rotary(torch.empty(0, dtype=torch.bfloat16), positions[1:])
    found = AxesAngles(rotary, torch.bfloat16)(positions)
    for one, other in zip(found, (cos, sin), strict=True):
        half = other.shape[-1] // 2
        assert torch.equal(one, other[0, :, :half])


@pytest.mark.parametrize("chunk", [pytest.param(5, marks=pytest.mark.slow), 48, 1000])
def test_fused_layers_equal_the_modules(stages: Stages, size: str, chunk: int) -> None:
    """Decode rows, chunks and images, including deepstack: same logits except for rounding, same choice."""
    exact, fused = (stages(size, kind, "bfloat16") for kind in ("exact", "auto"))
    assert isinstance(exact.generator._layers, ModuleLayers)  # type: ignore[attr-defined]
    assert isinstance(fused.generator._layers, FusedLanguage)  # type: ignore[attr-defined]
    twins = Twins(exact.generator, fused.generator)
    stage = Stage(exact.info, exact.preprocessor, exact.encoder, twins)
    Driver(stage, chunk=chunk, seed=chunk).run(
        mixed_questions(), arrivals=2, preempts=7 * (chunk > 5)
    )
    twins.check()


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
    twins = Twins(exact.generator, fused.generator)
    stage = Stage(exact.info, exact.preprocessor, exact.encoder, twins)
    Driver(stage, chunk=300, seed=1).run(mixed_questions(), arrivals=2)
    twins.check()
    _check_images(exact, fused, [(90, 60), (448, 448)])


def _exact_and_fused(checkpoint: Path) -> list[Stage]:
    kinds = ("exact", "auto")
    return [Stage.load(checkpoint, attention=kind, dtype="bfloat16") for kind in kinds]


@pytest.mark.slow
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


def test_one_call_computes_chunks_with_images_as_layer_by_layer(
    stages: Stages, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-VL adds image levels to the first layers, which therefore run one by one."""
    stage = stages(size, "auto", "bfloat16")
    layers: Any = stage.generator
    layers = layers._layers
    outputs = []
    for compiled in (layers._compiled_step, None):
        monkeypatch.setattr(layers, "_compiled_step", compiled)
        ran = Driver(stage, chunk=30).run(mixed_questions())
        outputs.append([list(each.sequence.outputs) for each in ran])
    assert outputs[0] == outputs[1]


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


def test_exact_and_single_keep_the_modules(stages: Stages) -> None:
    for kind, dtype in (("exact", "bfloat16"), ("auto", "float32")):
        stage = stages("nano25", kind, dtype)
        assert isinstance(stage.generator._layers, ModuleLayers)  # type: ignore[attr-defined]
        assert not _fused_blocks(stage)


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
