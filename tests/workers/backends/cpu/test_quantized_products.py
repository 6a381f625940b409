"""Products with quantized weights against reference products with the dequantized weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("numba")

from vsched_workers.backends.cpu.products import QuantizedProduct
from vsched_workers.backends.cpu.quantized.kernel import BLOCK, FEW_ROWS_MAX, PANEL, PASS_ROWS
from vsched_workers.quantized.weights import QuantizedWeight, quantize

pytestmark = pytest.mark.slow  # kernels are compiled

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
    made = quantize(plain, name, group=int(group.rstrip("+~") or 0))
    if kind.endswith("~"):
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(4))
        return dataclasses.replace(made, order=order.to(torch.int32))
    if not kind.endswith("+"):
        return made
    return dataclasses.replace(made, offsets=(drawn(*made.scales.shape) / 8).to(made.scales))


KINDS = ["int8", "int8 32", "int4 32", "int4 48", "int4 16+", "int8 16+", "fp8"]


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


def test_product_weighs_what_its_bits_weigh() -> None:
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
