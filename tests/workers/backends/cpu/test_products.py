"""Products with packed weights against plain ones, in bfloat16, widened as they are read, and in int8; activations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numba
import pytest
import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from torch.nn import functional

from tests.workers.backends.cpu.kernels.operands import draw, needs_bf16_dot
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cpu import products
from vsched_workers.backends.cpu.backend import CpuBackend
from vsched_workers.backends.cpu.kernels import activation
from vsched_workers.backends.cpu.kernels.activation import gelu, gelu_tanh, swiglu
from vsched_workers.backends.cpu.products import PanelProduct, QuantizedProduct, make_product
from vsched_workers.backends.cpu.quantized import block_sums
from vsched_workers.backends.cpu.quantized.block_sums import (
    PAIRS,
    PLAIN,
    ROW_BLOCK,
    VNNI,
    instructions,
)
from vsched_workers.backends.cpu.quantized.integers import OWN_ROWS_MAX, multiply_int8
from vsched_workers.backends.cpu.quantized.integers import PASS_ROWS as INT8_PASS_ROWS
from vsched_workers.backends.cpu.quantized.kernel import (
    BLOCK,
    FEW_ROWS_MAX,
    PANEL,
    PASS_ROWS,
    RESULT_PANELS,
    WHOLE_ROWS_BYTES,
)
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.quantized.weights import QuantizedWeight, quantize

pytest.importorskip("numba")

pytestmark = pytest.mark.slow  # kernels are compiled


def product_of(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = rows.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@needs_bf16_dot
@pytest.mark.parametrize(
    "shape", [(64, 32), (192, 96), (120, 32), (344, 34), (1015, 6), (128, 544)]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_panel_product_is_the_product_for_any_number_of_rows(
    shape: tuple[int, int], threads: int
) -> None:
    """Each number of rows in a pass, each share of prefetched lines; the last panel is padded, with or without bias.

    The response to a request does not depend, to the bit, on the number of requests in the batch.
    """
    torch.manual_seed(shape[0])
    outputs, inputs = shape
    bias = torch.randn(outputs).bfloat16() if shape[0] != 64 else None
    weight = torch.randn(outputs, inputs).bfloat16()
    product = PanelProduct(weight, bias, threads)
    assert product.size_bytes == -(-outputs // 64) * 64 * inputs * 2
    rows = torch.randn(1100, inputs).bfloat16()
    whole, wanted = product(rows), product_of(rows, weight, bias)
    # A sum is rounded once, at the end.
    torch.testing.assert_close(whole.double(), wanted, atol=1e-3, rtol=2**-8)
    tokens = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(product.rows_of(tokens), weight[tokens])
    for count in (*range(14), 19, 24, 25, 40, 100, 257):
        assert torch.equal(product(rows[:count]), whole[:count])
        assert torch.equal(product(rows[1100 - count :]), whole[1100 - count :])


@needs_bf16_dot
def test_panel_product_takes_rows_that_do_not_lie_together() -> None:
    weight = torch.randn(64, 32).bfloat16()
    rows = torch.randn(3, 5, 64).bfloat16()[..., ::2]
    found = PanelProduct(weight, None, 1)(rows)
    assert found.shape == (3, 5, 64)
    assert torch.allclose(found.double(), product_of(rows, weight, None), atol=1e-3, rtol=2**-8)


@needs_bf16_dot
def test_other_weights_and_processors_have_widened_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An odd number of inputs has no pairs."""
    monkeypatch.setattr(products, "has_tiles", lambda: False)
    weight = torch.randn(64, 33).bfloat16()
    assert isinstance(make_product(weight, None, threads=1), QuantizedProduct)
    weight = torch.randn(64, 32).bfloat16()
    assert isinstance(make_product(weight, None, threads=1), PanelProduct)
    monkeypatch.setattr(products, "has_bf16_dot", lambda: False)
    widened = make_product(weight, None, threads=1)
    assert isinstance(widened, QuantizedProduct)
    assert torch.equal(widened.rows_of(torch.tensor([63, 0])), weight[[63, 0]])
    rows = torch.randn(300, 32).bfloat16()
    wanted = product_of(rows, weight, None)
    assert torch.allclose(widened(rows).double(), wanted, atol=1e-3, rtol=2**-8)


SHAPES = [(PANEL, 32), (PANEL + 6, 48), (3 * PANEL, 2 * BLOCK + 64), (33, 40)]
ROWS = 2 * FEW_ROWS_MAX + 1


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(kind: str, outputs: int, inputs: int) -> QuantizedWeight:
    plain = drawn(outputs, inputs, seed=1).bfloat16()
    if kind == "fp8":
        return QuantizedWeight(
            kind="fp8",
            values=plain.to(torch.float8_e4m3fn).view(torch.uint8),
            scales=drawn(outputs, 1, seed=2).abs(),
            group=inputs,
            inputs=inputs,
            dtype=torch.bfloat16,
        )
    name, _, group = kind.partition(" ")
    made = quantize(plain, name.replace("fp", "int"), group=int(group.rstrip("+~") or 0))
    made = dataclasses.replace(made, kind=name)  # any codes of int4 are values of fp4
    if kind.endswith("~"):
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(4))
        return dataclasses.replace(made, order=order.to(torch.int32))
    if not kind.endswith("+"):
        return made
    return dataclasses.replace(made, offsets=(drawn(*made.scales.shape) / 8).to(made.scales))


KINDS = [
    "int8",
    "int8 32",
    "int4 32",
    "int4 48",
    "int4 16+",
    "int8 16+",
    "fp4 32",
    "fp4 16+",
    "fp8",
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "int4 32~", "int8 32~"])
def test_product_equals_that_by_the_dequantized_weight(kind: str, shape: tuple[int, int]) -> None:
    """In float32; one row, a pass, and enough rows to widen weights once: a row has the same bits in all of them."""
    weight, bias = weight_of(kind, *shape), drawn(shape[0], seed=3)
    product = QuantizedProduct(weight, bias, threads=1)
    rows = drawn(ROWS, shape[1])
    wanted = (rows.double() @ weight.dequantized().double().T + bias).float()
    found = product(rows)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for count in (*range(1, PASS_ROWS + 2), FEW_ROWS_MAX):
        assert torch.equal(product(rows[:count]), found[:count])


@pytest.mark.parametrize("kind", ["bfloat16", "int4 32+"])
def test_result_blocks_do_not_change_its_bits(kind: str) -> None:
    """Rows that do not fit into the cache, and outputs that are no whole number of result blocks."""
    inputs, outputs = 2 * BLOCK + 32, (RESULT_PANELS + 1) * PANEL - 3
    rows = drawn(WHOLE_ROWS_BYTES // (4 * inputs) + 1, inputs)
    weight = (
        drawn(outputs, inputs).bfloat16()
        if kind == "bfloat16"
        else weight_of(kind, outputs, inputs)
    )
    product = QuantizedProduct(weight, drawn(outputs, seed=3), threads=2)
    found = product(rows)
    for start in range(0, len(rows), 1000):
        part = slice(start, start + 1000)
        assert torch.equal(product(rows[part]), found[part])


def test_inputs_of_a_block_are_summed_in_one_order() -> None:
    """Sums have four accumulators; with all weights at the minimum of int4, the result is the negative sum.

    With fastmath, LLVM chose the order: one order in the compiling process, another in processes that load the kernel.
    """
    weight = quantize(torch.full((PANEL, 32), -1.0), "int4", group=32)
    rows = drawn(9, 32) * 10 ** drawn(9, 32, seed=3)
    chains = torch.zeros(9, 4)
    for step in rows.view(9, 8, 4).unbind(1):
        chains += step
    wanted = (chains[:, 0] + chains[:, 1]) + (chains[:, 2] + chains[:, 3])
    found = QuantizedProduct(weight, None, threads=1)(rows)
    assert torch.equal(found, -wanted[:, None].expand(9, PANEL))


@pytest.mark.parametrize("kind", ["int8", "int4 32"])
def test_product_of_bfloat16_rows_is_rounded_once(kind: str) -> None:
    weight = weight_of(kind, 3 * PANEL, 96)
    product = QuantizedProduct(weight, None, threads=2)
    rows = drawn(2, ROWS, 96).bfloat16()
    wanted = rows.double() @ weight.dequantized().double().T
    found = product(rows)
    assert found.dtype == torch.bfloat16
    assert found.shape == (2, ROWS, 3 * PANEL)
    assert (found == wanted.bfloat16()).float().mean() > 0.99
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_weight_are_those_that_it_stands_for(kind: str) -> None:
    weight = weight_of(kind, 2 * PANEL, 80)
    product = QuantizedProduct(weight, None, threads=1)
    indices = torch.tensor([0, PANEL, 2 * PANEL - 1, 0])
    assert torch.equal(product.rows_of(indices), weight.dequantized()[indices].bfloat16())


def test_product_reports_the_bytes_of_its_weight() -> None:
    outputs, inputs = 4 * PANEL, 256
    sizes = {
        kind: QuantizedProduct(weight_of(kind, outputs, inputs), None, threads=1).size_bytes
        for kind in ("int8", "int4 32")
    }
    assert sizes["int8"] == outputs * inputs + 4 * outputs
    assert sizes["int4 32"] == outputs * inputs // 2 + 2 * outputs * inputs // 32


def test_product_by_a_plain_weight_in_float32() -> None:
    weight, rows = drawn(PANEL + 8, 96, seed=1), drawn(ROWS, 96)
    found = QuantizedProduct(weight, None, threads=1)(rows)
    torch.testing.assert_close(found, rows @ weight.T, rtol=1e-4, atol=1e-4)


INT8_SHAPES = [(PANEL, 32), (PANEL + 6, 48), (3 * PANEL, 704), (33, 40)]
INT8_KINDS = ["int8", "int8 32", "int4 32", "int4 128", "int4 32+", "int8 32+", "fp4 32", "fp4 64+"]
INT8_ROWS = 3 * OWN_ROWS_MAX + 1


def in_int8(rows: torch.Tensor) -> torch.Tensor:
    """Return rows quantized to int8 and dequantized, in float64."""
    blocks: Any = functional.pad(rows.float(), (0, -rows.shape[1] % ROW_BLOCK)).unflatten(
        1, (-1, 32)
    )
    largest = blocks.abs().amax(-1, keepdim=True)
    numbers = (blocks * (127 / largest)).round().nan_to_num()
    found: torch.Tensor = (numbers.double() * (largest / 127)).flatten(1)[:, : rows.shape[1]]
    return found


def product_with(tag: Any, monkeypatch: pytest.MonkeyPatch, *given: Any) -> QuantizedProduct:
    monkeypatch.setattr(products, "instructions", lambda: tag)
    return QuantizedProduct(*given, threads=1, int8_activations=True)


@pytest.mark.parametrize("shape", INT8_SHAPES, ids=str)
@pytest.mark.parametrize("kind", INT8_KINDS)
def test_product_equals_a_plain_one_of_the_same_numbers(kind: str, shape: tuple[int, int]) -> None:
    """One row, a pass, rows for one thread and more: a row has the same bits in all of them."""
    weight, bias = weight_of(kind, *shape), drawn(shape[0], seed=3)
    product = QuantizedProduct(weight, bias, threads=1, int8_activations=True)
    rows = drawn(INT8_ROWS, shape[1])
    found = product(rows)
    wanted = product_of(in_int8(rows), weight.dequantized(), bias).float()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=3e-5)
    by_floats = QuantizedProduct(weight, bias, threads=1)(rows)
    assert not torch.equal(found, by_floats)
    for count in (*range(1, INT8_PASS_ROWS + 2), OWN_ROWS_MAX, OWN_ROWS_MAX + 1):
        assert torch.equal(product(rows[:count]), found[:count])


@pytest.mark.parametrize("kind", ["int8 32+", "int4 32+", "fp4 32+"])
def test_all_instructions_have_the_same_sums(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = weight_of(kind, PANEL + 2, 96), drawn(INT8_PASS_ROWS + 1, 96)
    wanted = product_with(PLAIN, monkeypatch, weight, None)(rows)
    # A processor with the best instructions has `PAIRS` too; on some processors these are the best.
    for tag in [] if instructions() is PLAIN else [PAIRS, instructions()]:
        product = product_with(tag, monkeypatch, weight, None)
        assert torch.equal(product(rows), wanted)
        for count in range(1, INT8_PASS_ROWS + 1):
            assert torch.equal(product(rows[:count]), wanted[:count])


@pytest.mark.parametrize("kind", ["int8", "int4", "fp4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_do_not_overflow(kind: str, sign: int) -> None:
    """Includes -128, which does not occur in weights quantized here but may in those of checkpoints."""
    values = {"int8": torch.full((PANEL, 64), -128, dtype=torch.int8)}.get(
        kind, torch.full((PANEL, 32), 0xFF, dtype=torch.uint8)
    )
    ones = torch.ones(PANEL, 1, dtype=torch.float16)
    weight = QuantizedWeight(kind, values, ones, 64, 64, torch.bfloat16)
    rows = torch.full((2, 64), 127.0 * sign)
    found = QuantizedProduct(weight, None, threads=1, int8_activations=True)(rows)
    assert torch.equal(found, rows @ weight.dequantized().T)


def test_products_of_whole_numbers_are_exact_on_all_threads() -> None:
    """Scales are one or powers of two: only the result is rounded, in bfloat16 as well."""
    weight = dataclasses.replace(weight_of("int4 32", 5 * PANEL, 128), dtype=torch.bfloat16)
    weight = dataclasses.replace(weight, scales=torch.full_like(weight.scales, 0.25))
    rows = torch.randint(-126, 127, (2, INT8_ROWS, 128), generator=torch.Generator().manual_seed(4))
    rows[..., ::ROW_BLOCK] = 127
    product = QuantizedProduct(weight, None, threads=2, int8_activations=True)
    wanted = rows.float() @ weight.dequantized().T
    assert torch.equal(product(rows.float()), wanted)
    assert torch.equal(product(rows.bfloat16()), wanted.bfloat16())


def test_zeros_stay_zeros_and_nan_stays_nan() -> None:
    weight, bias = weight_of("int4 32", PANEL, 64), drawn(PANEL)
    rows = drawn(4, 64)
    rows[0], rows[1, 40], rows[2, 3] = 0.0, torch.nan, torch.inf
    found = QuantizedProduct(weight, bias, threads=1, int8_activations=True)(rows)
    assert torch.equal(found[0], bias)
    assert not found[1:3].isfinite().any()
    assert found[3].isfinite().all()


def test_rows_stay_floats_if_groups_are_not_of_whole_blocks() -> None:
    weight, rows = weight_of("int4 48", PANEL, 96), drawn(2, 96)
    found = QuantizedProduct(weight, None, threads=1, int8_activations=True)(rows)
    assert torch.equal(found, QuantizedProduct(weight, None, threads=1)(rows))


def test_vnni_is_written_as_its_instruction() -> None:
    """Compiled for a processor with VNNI, whether or not this one has it."""
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(
        cpu="sierraforest", features="+avxvnni,+avx512vnni,+avx512vl"
    )
    module = ir.Module()
    module.triple = target.triple
    parameters = [ir.IntType(64)] * 3
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), "sums")
    builder = ir.IRBuilder(function.append_basic_block())
    weight_at, row_at, out_at = function.args
    dots = block_sums.BlockSums(builder, numba.types.int8, numba.typeof(VNNI).dtype)
    (found,) = dots.sums(weight_at, [0], [row_at], [None])
    builder.store(found, builder.inttoptr(out_at, found.type.as_pointer()), align=4)
    builder.ret_void()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    assert len(re.findall(r"vpdpbusd", machine.emit_assembly(parsed))) == ROW_BLOCK // 4


@pytest.mark.parametrize(
    ("activations", "dtype", "best", "wanted"),
    [
        ("float", torch.bfloat16, VNNI, False),
        ("int8", torch.float32, VNNI, True),
        ("auto", torch.float32, VNNI, False),
        ("auto", torch.bfloat16, VNNI, True),
        ("auto", torch.bfloat16, PLAIN, False),
    ],
)
def test_activations_are_quantized_as_requested(
    activations: str, dtype: torch.dtype, best: Any, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For weights quantized on loading, and for weights of a quantized checkpoint."""
    monkeypatch.setattr(products, "instructions", lambda: best)
    weight = weight_of("int4 32", PANEL, 64)
    for deterministic in (False, True):
        settings = WorkerSettings(
            weights="int4", activations=activations, deterministic=deterministic
        )
        backend = CpuBackend(settings, dtype)
        makes: list[Any] = [backend._make_plain, backend.make_product]
        assert [make(weight, None).kernel is multiply_int8 for make in makes] == [wanted, wanted]


def test_loops_of_activations_have_names_of_their_own() -> None:
    """Stored code is linked by name: of two loops with one name, a process would call the first in both kernels."""
    loops = activation._silu_row, activation._gelu_row, activation._gelu_tanh_row
    assert len({loop.py_func.__qualname__ for loop in loops}) == 3
    assert all("<locals>" not in loop.py_func.__qualname__ for loop in loops)


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        (swiglu, functional.silu),
        (gelu, functional.gelu),
        (gelu_tanh, lambda rows: functional.gelu(rows, approximate="tanh")),
    ],
    ids=["silu", "gelu", "tanh"],
)
@pytest.mark.parametrize(
    ("threads", "rows", "gated"), [(0, 7, True), (2, 3000, True), (2, 9, False)]
)
def test_activations_equal_the_modules(
    kernel: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    threads: int,
    rows: int,
    gated: bool,
) -> None:
    """Far from zero they are the identity, or zero; the exponential neither overflows nor yields NaN."""
    gate, up = draw(rows, 37) * 4, draw(rows, 37, seed=1)
    gate[0, :6] = torch.tensor([0.0, -0.0, 300.0, -300.0, 17.0, -17.0])
    wanted = function(gate.float()).bfloat16()
    pool = pool_of(threads) if threads else 0
    if gated:
        wanted *= up
    kernel(pool, gate.data_ptr(), up.data_ptr() if gated else 0, rows, 37)
    clear = wanted.abs() > 1e-3  # torch subtracts two nearly equal numbers
    assert (gate == wanted)[clear].float().mean() > 0.95
    torch.testing.assert_close(gate, wanted, rtol=2**-6, atol=1e-6)  # both round twice
