"""Packed weights: the same result, computed with few values of M only."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from vsched_workers.backends.reference.packed_weights import (
    FEW_ROWS,
    MANY_ROWS,
    BlockedActivation,
    PackedLinear,
    PackedWeight,
    block_activations,
    block_starts,
    pack_linears,
    packs,
    warm_up,
)
from vsched_workers.memory.sparse_runs import sparsely

pytestmark = pytest.mark.skipif(not packs(torch.bfloat16), reason="oneDNN packs no bfloat16 here")

Multiply = Callable[..., torch.Tensor]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the values of M that oneDNN is called with."""
    found: list[int] = []
    init = PackedWeight.__init__

    def watched(self: PackedWeight, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        multiply: Multiply = self._multiply

        def count(rows: torch.Tensor, *others: object) -> torch.Tensor:
            found.append(rows.numel() // rows.shape[-1])
            return multiply(rows, *others)

        self._multiply = count

    monkeypatch.setattr(PackedWeight, "__init__", watched)
    return found


@pytest.mark.parametrize("sizes", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("rows", [0, 1, 3, 5, 16, 63, 255, 256, 257, 600])
def test_packed_weight_multiplies_with_few_numbers_of_rows(
    counts: list[int], sizes: tuple[int, ...], rows: int
) -> None:
    """The memory of oneDNN's compiled code is bounded, and thus known before anything is sized."""
    torch.manual_seed(rows)
    weight, bias = torch.randn(24, 16).bfloat16(), torch.randn(24).bfloat16()
    packed = PackedWeight(weight, bias, sizes)
    given = torch.randn(1, rows, 16).bfloat16()
    found = packed(given)
    assert set(counts) <= {*sizes, 0}
    assert found.shape == (1, rows, 24)
    wanted = given.double() @ weight.double().T + bias.double()
    assert torch.allclose(found.double(), wanted, atol=0.05, rtol=0.02)


def test_packed_weight_gives_every_row_what_it_gets_alone() -> None:
    """A row's result does not depend on other rows or on the split into blocks."""
    packed = PackedWeight(torch.randn(24, 16).bfloat16(), None)
    given = torch.randn(300, 16).bfloat16()
    whole = packed(given)
    for start, stop in ((0, 256), (256, 300), (10, 15), (290, 293)):
        assert torch.equal(packed(given[start:stop]), whole[start:stop])


def test_warm_up_meets_every_number_of_rows_once_a_shape(counts: list[int]) -> None:
    """Serving compiles nothing that was not compiled when the KV cache was sized."""
    module = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 24)).bfloat16()
    assert pack_linears(module, MANY_ROWS) == 2 * (16 * 24 + 2 * 24 * 24)
    assert all(isinstance(child, PackedLinear) for child in module)
    warm_up(module)
    assert counts == list(MANY_ROWS) * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 256, 700])
def test_blocked_activation_sees_few_numbers_of_rows(rows: int, dtype: torch.dtype) -> None:
    """OneDNN keeps its code for each size; the values are bit-identical."""
    tower = nn.Sequential(nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU())
    block_activations(tower)
    assert isinstance(tower[0], BlockedActivation)
    assert not any(isinstance(other, BlockedActivation) for other in list(tower)[1:])
    seen: list[int] = []
    tower[0].activation.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    torch.manual_seed(rows)
    given = torch.randn(1, rows, 24).to(dtype)
    assert torch.equal(tower[0](given), nn.functional.gelu(given))
    assert set(seen) <= set(MANY_ROWS)


def test_blocks_of_a_product_that_takes_any_number_are_of_about_the_same_size() -> None:
    """Each block reads the weight. OneDNN only gets sizes that it has compiled code for."""
    sizes = {
        count: [min(start + starts.step, count) - start for start in starts]
        for count in (0, 1, 384, 385, 476, 952, 1153)
        for starts in [block_starts(count, 384, sys.maxsize)]
    }
    assert sizes == {
        0: [],
        1: [1],
        384: [384],
        385: [224, 161],
        476: [256, 220],
        952: [320, 320, 312],
        1153: [320, 320, 320, 193],
    }
    assert list(block_starts(900, 256, 128)) == [0, 256, 512, 768]
    with sparsely():
        assert block_starts(476, 384, sys.maxsize).step == 384, "384 rows take more than 476"
