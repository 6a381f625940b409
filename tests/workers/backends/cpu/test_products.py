"""Products in panels: same results as oneDNN, for any number of rows, from the weight that oneDNN packed.

For tiles see `kernels/test_tiles.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy.typing as npt
import pytest
import torch

pytest.importorskip("numba")

from vsched_workers.backends.cpu import operand_choice, products
from vsched_workers.backends.cpu.kernels.bf16 import BF16, FLOAT32
from vsched_workers.backends.cpu.operand_choice import operand, supports_bf16
from vsched_workers.backends.cpu.products import (
    PanelProduct,
    panel_product,
)
from vsched_workers.backends.cpu.tiles.kernel import has_tiles
from vsched_workers.backends.reference.packed_weights import (
    FEW_ROWS,
    PackedWeight,
    packs,
    padded_rows,
)

pytestmark = [
    pytest.mark.skipif(not packs(torch.bfloat16), reason="oneDNN packs no bfloat16 here"),
    pytest.mark.skipif(not supports_bf16(), reason="oneDNN multiplies all rows on this processor"),
    pytest.mark.slow,
]

needs_whole_panels = pytest.mark.skipif(has_tiles(), reason="oneDNN packs for tiles here")
OPERANDS = [
    pytest.param(BF16, id="bf16", marks=needs_whole_panels),
    pytest.param(FLOAT32, id="float32"),
]
Operand = npt.NDArray[Any]
SHAPES = [(64, 32), (192, 96), (320, 256)]


@pytest.fixture(params=OPERANDS, autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Operand:
    """Operands to use, whichever are faster here, as on a processor without AMX."""
    found: Operand = request.param
    monkeypatch.setattr(products, "has_tiles", lambda: False)
    monkeypatch.setattr(products, "operand", lambda: found)
    return found


def _packed(
    weight: torch.Tensor, bias: torch.Tensor | None = None, threads: int = 1
) -> PackedWeight:
    make_custom = functools.partial(panel_product, threads=threads)
    return PackedWeight(weight, bias, make_custom=make_custom)


def _wanted(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = rows.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_panel_product_is_the_product_for_any_number_of_rows(
    shape: tuple[int, int], threads: int
) -> None:
    """All numbers of rows up to the maximum, including each pass and each share of prefetched lines."""
    torch.manual_seed(shape[0])
    outputs, inputs = shape
    for bias in (None, torch.randn(outputs).bfloat16()):
        weight = torch.randn(outputs, inputs).bfloat16()
        packed = _packed(weight, bias, threads)
        assert packed.custom is not None
        for count in (*range(20), 23, 24, 25, 31, 36, 100, 128, 257):
            rows = torch.randn(count, inputs).bfloat16()
            found = packed(rows)
            assert found.shape == (count, outputs)
            # A sum is rounded once, at the end.
            wanted = _wanted(rows, weight, bias)
            assert torch.allclose(found.double(), wanted, atol=1e-3, rtol=2**-8)


def test_panel_product_gives_a_row_the_same_among_any_others() -> None:
    """The response to a request does not depend, to the bit, on the number of requests in the batch."""
    torch.manual_seed(1)
    packed = _packed(torch.randn(128, 544).bfloat16(), torch.randn(128).bfloat16())
    assert packed.custom is not None
    rows = torch.randn(128, 544).bfloat16()
    whole = packed(rows)
    for count in (1, 2, 5, 7, 13, 40):
        assert torch.equal(packed(rows[:count]), whole[:count])
        assert torch.equal(packed(rows[-count:]), whole[-count:])


def test_panel_product_takes_rows_that_do_not_lie_together() -> None:
    weight = torch.randn(64, 32).bfloat16()
    rows = torch.randn(3, 5, 64).bfloat16()[..., ::2]
    packed = _packed(weight)
    assert packed.custom is not None
    found = packed(rows)
    assert found.shape == (3, 5, 64)
    assert torch.allclose(found.double(), _wanted(rows, weight, None), atol=1e-3, rtol=2**-8)


def test_packed_weight_multiplies_blocks_of_about_the_same_size() -> None:
    weight = torch.randn(64, 32).bfloat16()
    packed = _packed(weight)
    seen: list[int] = []
    own: Any = packed.custom
    assert own is not None

    def watch(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        found: torch.Tensor = own(rows)
        return found

    packed.custom = watch  # type: ignore[assignment]
    block = FEW_ROWS[-1]
    rows = torch.randn(block + 5, 32).bfloat16()
    assert torch.allclose(packed(rows).double(), _wanted(rows, weight, None), atol=1e-3, rtol=2**-8)
    assert seen == [160, 101]
    assert padded_rows(block + 129, custom=packed.custom_rows_max) == block + 129


@pytest.mark.parametrize("shape", [(40, 32), (64, 33), (13, 32)])
def test_weights_of_other_shapes_are_left_to_onednn(shape: tuple[int, int]) -> None:
    packed = _packed(torch.randn(*shape).bfloat16())
    assert packed.custom_rows_max == 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(120, 32), (344, 34), (1015, 6)])
def test_last_panel_is_filled_up(shape: tuple[int, int], threads: int) -> None:
    """Few towers have layers of whole panels. Padding of the last one is neither written nor read."""
    outputs, inputs = shape
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    packed = _packed(weight, bias, threads)
    assert packed.size_bytes == -(-outputs // 64) * 64 * inputs * 2
    for count in (1, 7, 300):
        rows = torch.randn(count, inputs).bfloat16()
        found = packed(rows)
        assert found.shape == (count, outputs)
        wanted = _wanted(rows, weight, bias)
        assert torch.allclose(found.double(), wanted, atol=1e-3, rtol=2**-8)


def test_processors_without_the_instruction_are_left_to_onednn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.randn(192, 64).bfloat16()
    monkeypatch.setattr(operand_choice, "has_bf16_dot", lambda: False)
    assert panel_product(weight, None, threads=1) is None


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tag", [BF16, FLOAT32], ids=["pairs", "singles"])
def test_panels_of_our_own_are_multiplied_alike(
    threads: int, tag: Operand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every type that oneDNN packs here."""
    monkeypatch.setattr(products, "operand", lambda: tag)
    torch.manual_seed(3)
    weight, bias = torch.randn(192, 96).bfloat16(), torch.randn(192).bfloat16()
    product = PanelProduct(*products._pack(weight), weight.shape, bias, threads)
    for count in (*range(14), 40):
        rows = torch.randn(count, 96).bfloat16()
        wanted = _wanted(rows, weight, bias)
        assert torch.allclose(product(rows).double(), wanted, atol=1e-3, rtol=2**-8)


@pytest.mark.parametrize(("float32_s", "wanted"), [(0.5, FLOAT32), (0.95, BF16), (2.0, BF16)])
def test_operand_is_what_takes_less_time(
    float32_s: float, wanted: Operand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of several rounds counts, and float32 must win by more than the cost of widening."""
    taken = {BF16.dtype: iter([9.0, 1.0] * 8), FLOAT32.dtype: iter([float32_s, 9.0] * 8)}
    monkeypatch.setattr(operand_choice, "_seconds", lambda tag: next(taken[tag.dtype]))
    monkeypatch.setattr(operand_choice, "choice_file", lambda: None)
    assert operand.__wrapped__() is wanted


def test_operands_are_timed_by_what_they_take() -> None:
    assert operand_choice._seconds(BF16) > 0 < operand_choice._seconds(FLOAT32)
    assert operand() in (BF16, FLOAT32)
