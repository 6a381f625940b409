"""Products in panels: any number of rows, in panels of 64 outputs. For tiles see `kernels/test_tiles.py`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from tests.workers.backends.cpu.kernels.operands import needs_bf16_dot
from vsched_workers.backends.cpu import products
from vsched_workers.backends.cpu.products import PanelProduct, QuantizedProduct, make_product

pytestmark = [needs_bf16_dot, pytest.mark.slow]


def _wanted(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = rows.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("shape", [(64, 32), (192, 96), (120, 32), (344, 34), (1015, 6)])
@pytest.mark.parametrize("threads", [1, 2])
def test_panel_product_is_the_product_for_any_number_of_rows(
    shape: tuple[int, int], threads: int
) -> None:
    """Each number of rows in a pass, each share of prefetched lines; the last panel is padded, with or without bias."""
    torch.manual_seed(shape[0])
    outputs, inputs = shape
    bias = torch.randn(outputs).bfloat16() if shape[0] != 64 else None
    weight = torch.randn(outputs, inputs).bfloat16()
    product = PanelProduct(weight, bias, threads)
    assert product.size_bytes == -(-outputs // 64) * 64 * inputs * 2
    for count in (*range(14), 19, 24, 25, 100, 257):
        rows = torch.randn(count, inputs).bfloat16()
        found = product(rows)
        assert found.shape == (count, outputs)
        # A sum is rounded once, at the end.
        wanted = _wanted(rows, weight, bias)
        assert torch.allclose(found.double(), wanted, atol=1e-3, rtol=2**-8)


def test_panel_product_gives_a_row_the_same_among_any_others() -> None:
    """The response to a request does not depend, to the bit, on the number of requests in the batch."""
    torch.manual_seed(1)
    product = PanelProduct(torch.randn(128, 544).bfloat16(), torch.randn(128).bfloat16(), 1)
    rows = torch.randn(1100, 544).bfloat16()
    whole = product(rows)
    for count in (1, 2, 5, 7, 13, 40):
        assert torch.equal(product(rows[:count]), whole[:count])
        assert torch.equal(product(rows[-count:]), whole[-count:])


def test_panel_product_takes_rows_that_do_not_lie_together() -> None:
    weight = torch.randn(64, 32).bfloat16()
    rows = torch.randn(3, 5, 64).bfloat16()[..., ::2]
    found = PanelProduct(weight, None, 1)(rows)
    assert found.shape == (3, 5, 64)
    assert torch.allclose(found.double(), _wanted(rows, weight, None), atol=1e-3, rtol=2**-8)


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
    rows = torch.randn(300, 32).bfloat16()
    wanted = _wanted(rows, weight, None)
    assert torch.allclose(widened(rows).double(), wanted, atol=1e-3, rtol=2**-8)
