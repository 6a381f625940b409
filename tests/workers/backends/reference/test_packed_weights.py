"""Packed weights: blocks of rows, and activations that oneDNN computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vsched_workers.backends.reference.packed_weights import (
    BlockedActivation,
    PackedLinear,
    PackedProduct,
    Weight,
    block_activations,
    block_starts,
    pack_linears,
    warm_up,
)
from vsched_workers.memory.sparse_runs import sparsely


class _Watched(PackedProduct):
    """Records the numbers of rows that it multiplies."""

    many_rows_min = 17

    def __init__(self, weight: Weight, _bias: torch.Tensor | None) -> None:
        self.shape, self.size_bytes = (weight.shape[0], weight.shape[1]), 10
        self.counts: list[int] = []

    def multiply_rows(self, dtype: torch.dtype, rows_at: int, count: int, result_at: int) -> None:
        del dtype, rows_at, result_at
        self.counts.append(count)


def test_warm_up_multiplies_by_each_shape_once_for_each_kernel() -> None:
    """Serving compiles nothing that was not compiled when the KV cache was sized."""
    module = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 24)).bfloat16()
    assert pack_linears(module, _Watched) == 30
    packed = [child.packed for child in module if isinstance(child, PackedLinear)]
    warm_up(module, torch.bfloat16)
    counts = [each.counts for each in packed if isinstance(each, _Watched)]
    assert sorted(map(sorted, counts)) == [[], [1, 17], [1, 17]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 17, 256, 700])
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
    assert set(seen) <= set(BlockedActivation.SIZES)


def test_blocks_of_rows_are_of_about_the_same_size() -> None:
    """Each block reads the weight."""
    sizes = {
        count: [min(start + starts.step, count) - start for start in starts]
        for count in (0, 1, 1024, 1025, 2500)
        for starts in [block_starts(count)]
    }
    assert sizes == {0: [], 1: [1], 1024: [1024], 1025: [544, 481], 2500: [864, 864, 772]}
    product = _Watched(torch.zeros(4, 8), None)
    assert product(torch.zeros(25, 100, 8)).shape == (25, 100, 4)
    assert product.counts == sizes[2500]
    with sparsely():
        assert block_starts(1300).step == 1024, "1024 rows take more than 1300"
