"""Products in tiles, on processors with AMX: with bfloat16 weights, and with dequantized ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("numba")

from tests.workers.backends.cpu.test_products import KINDS, drawn, product_of, weight_of
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cpu.backend import CpuBackend
from vsched_workers.backends.cpu.products import (
    PanelProduct,
    QuantizedProduct,
    make_product,
    widens_in_tiles,
)
from vsched_workers.backends.cpu.quantized.widened import ROWS_MIN
from vsched_workers.backends.cpu.tiles.kernel import (
    HALF,
    OWN_ROWS_MAX,
    STEP_INPUTS,
    TILE_ROWS,
    has_tiles,
    multiply_in_tiles,
    parts_of,
)
from vsched_workers.memory.sparse_runs import sparsely
from vsched_workers.quantized.weights import QuantizedWeight

pytestmark = [
    pytest.mark.skipif(not has_tiles(), reason="needs amx_bf16"),
    pytest.mark.slow,  # kernels are compiled
]

SHAPES = [
    pytest.param((64, 32), id="one step"),
    pytest.param((200, 98), id="a rest, and an end of half a panel"),
    pytest.param((120, 2), id="no whole step"),
    pytest.param((700, 1176), id="many panels"),
    pytest.param((64, 4096 + 64), id="many inputs"),
]
COUNTS = [0, 1, 2, 100, OWN_ROWS_MAX, OWN_ROWS_MAX + 1]
COUNTS += [TILE_ROWS - 1, 2 * TILE_ROWS, 2 * TILE_ROWS + 1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_rows_is_multiplied_and_each_has_the_same_bits(
    shape: tuple[int, int], threads: int
) -> None:
    outputs, inputs = shape
    weight = drawn(outputs, inputs, seed=1).bfloat16()
    rows = drawn(max(COUNTS), inputs).bfloat16()
    for bias in (None, drawn(outputs, seed=2).bfloat16()):
        product = make_product(weight, bias, threads=threads)
        assert isinstance(product, PanelProduct)
        assert product.kernel is multiply_in_tiles
        whole = product(rows)
        # A sum is rounded once, at the end.
        sums = product_of(rows, weight, bias)
        assert torch.allclose(whole.double(), sums, atol=2e-3 * inputs**0.5 / 10, rtol=2**-8)
        for count in COUNTS:
            assert torch.equal(product(rows[:count]), whole[:count])
            assert torch.equal(product(rows[100 - count :]), whole[100 - count :])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["bfloat16", "int4 32", "int8 48"])
@pytest.mark.parametrize("count", [40, 300, 600])
def test_rows_are_multiplied_part_by_part_of_many_inputs(
    kind: str, count: int, threads: int
) -> None:
    """The last part is smaller, accumulators of some half-panels are stored at a time, and the last one is padded."""
    outputs, inputs = 1592, {"bfloat16": 2090, "int4 32": 2080, "int8 48": 2064}[kind]
    halves = -(-outputs // HALF)
    parts = parts_of(count, inputs, halves, 1)
    assert parts.number > 1
    assert (parts.together < halves) is (count > 40)
    few = 2 * TILE_ROWS
    assert parts_of(few, inputs, halves, 1).number == 1
    rows = drawn(count, inputs).bfloat16()
    if kind == "bfloat16":
        weight = drawn(outputs, inputs, seed=1).bfloat16()
        product = make_product(weight, None, threads=threads)
    else:
        quantised = weight_of(kind, outputs, inputs)
        weight = quantised.dequantized().bfloat16()
        product = QuantizedProduct(quantised, None, threads=threads, tiles=True)
    assert product is not None
    found = product(rows)
    within = 2e-3 * inputs**0.5
    assert torch.allclose(found.double(), product_of(rows, weight, None), atol=within, rtol=2**-7)
    assert torch.equal(found[:few], product(rows[:few])), "these are multiplied as a whole"


def test_a_last_part_may_have_no_whole_step() -> None:
    rows, inputs = 1024, 7682
    parts = parts_of(rows, inputs, 2, 1)
    assert (parts.number - 1) * parts.size == inputs // STEP_INPUTS
    weight, taken = drawn(64, inputs, seed=1).bfloat16(), drawn(rows, inputs).bfloat16()
    product = make_product(weight, None, threads=1)
    assert product is not None
    sums = product_of(taken, weight, None)
    assert torch.allclose(product(taken).double(), sums, atol=2e-3 * inputs**0.5, rtol=2**-7)


@pytest.mark.parametrize("count", [5, ROWS_MIN, 100])
def test_nonsense_of_one_row_stays_in_that_row(count: int) -> None:
    """Nor does memory after the inputs, or after the last row, affect any row."""
    weight, bad = drawn(64, STEP_INPUTS + 6, seed=1).bfloat16(), count // 2
    rows = drawn(count, STEP_INPUTS + 6).bfloat16()
    for product in (
        make_product(weight, None, threads=1),
        QuantizedProduct(weight_of("int4 32", 64, STEP_INPUTS + 6), None, threads=1, tiles=True),
    ):
        assert product is not None
        good = product(rows)
        spoilt = rows.clone()
        spoilt[bad] = float("nan")
        found = product(spoilt)
        assert found[bad].isnan().all()
        others = torch.arange(count) != bad
        assert torch.equal(found[others], good[others])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(64, 32), (70, 48), (192, 320), (33, 40)], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "int4 32~", "int8 32~"])
def test_many_rows_are_multiplied_by_the_dequantized_weight(
    kind: str, shape: tuple[int, int], threads: int
) -> None:
    weight, bias = weight_of(kind, *shape), drawn(shape[0], seed=3)
    product = QuantizedProduct(weight, bias, threads=threads, tiles=True)
    rows = drawn(ROWS_MIN + 50, shape[1]).bfloat16()
    found = product(rows)
    plain = weight.dequantized().bfloat16()
    sums = product_of(rows, plain, bias)
    assert torch.allclose(found.double(), sums, atol=2e-3 * shape[1] ** 0.5, rtol=2**-7)
    for count in (ROWS_MIN, ROWS_MIN + 9):
        assert torch.equal(product(rows[:count]), found[:count])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("halves", [True, False], ids=["float16", "float32"])
@pytest.mark.parametrize("kind", ["int8", "int4", "fp4"])
def test_weights_are_widened_exactly_and_rounded_once(
    kind: str, threads: int, *, halves: bool
) -> None:
    """Every value of a weight, by rows that each select one input."""
    inputs, outputs = 256, 64
    values = torch.arange(-128, 128, dtype=torch.int8).repeat(outputs, 1)
    if kind != "int8":
        values = (torch.arange(inputs // 2) % 256).to(torch.uint8).repeat(outputs, 1)
    scales = (drawn(outputs, inputs // 32, seed=5).abs() + 2**-10).half()
    weight = QuantizedWeight(
        kind=kind,
        values=values,
        scales=scales if halves else scales.float() * (1 + 2**-18),
        group=32,
        inputs=inputs,
        dtype=torch.float32,
    )
    product = QuantizedProduct(
        dataclasses.replace(weight, dtype=torch.bfloat16), None, threads=threads, tiles=True
    )
    found = product(torch.eye(inputs).bfloat16())
    assert torch.equal(found.T, weight.dequantized().bfloat16())


def test_few_rows_keep_their_kernel_and_8_bits_their_word() -> None:
    weight = weight_of("int8 32", 64, 64)
    few, tiled = (
        QuantizedProduct(weight, None, threads=1, int8_activations=True, tiles=each)
        for each in (False, True)
    )
    rows = drawn(ROWS_MIN, 64).bfloat16()
    assert torch.equal(few(rows[:-1]), tiled(rows[:-1]))
    assert not torch.equal(few(rows), tiled(rows))
    assert torch.equal(few(rows.float()), tiled(rows.float()))
    requested = [WorkerSettings(activations=each) for each in ("auto", "float", "int8")]
    assert [widens_in_tiles(each, torch.bfloat16) for each in requested] == [True, True, False]
    assert not widens_in_tiles(requested[0], torch.float32)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sparse_run_computes_some_outputs_and_leaves_zeros(threads: int) -> None:
    rows = drawn(40, 64).bfloat16()
    for product in (
        make_product(drawn(512, 64, seed=1).bfloat16(), None, threads=threads),
        QuantizedProduct(weight_of("int8 32", 512, 64), None, threads=threads, tiles=True),
    ):
        assert product is not None
        with sparsely():
            found = product(rows)
        assert found.shape == (40, 512)
        assert found.isfinite().all()
        assert 0 < int(found.count_nonzero()) < found.numel()


def test_deterministic_models_have_no_tiles() -> None:
    """Few and many rows use the same kernel."""
    weight = drawn(64, 64, seed=1).bfloat16()
    for deterministic in (False, True):
        settings = WorkerSettings(weights="int8", threads=1, deterministic=deterministic)
        backend = CpuBackend(settings, torch.bfloat16)
        assert backend._make_plain is not None
        assert backend.make_head is not None
        plain, quantised = backend._make_plain(weight, None), backend.make_head(weight, None)
        assert isinstance(plain, PanelProduct)
        assert isinstance(quantised, QuantizedProduct)
        assert (plain.kernel is multiply_in_tiles) is not deterministic
        assert (quantised.many_rows_min == ROWS_MIN) is not deterministic
