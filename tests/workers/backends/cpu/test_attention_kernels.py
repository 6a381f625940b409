"""Decode attention for one row: pairs of bfloat16 and the plain kernel, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("numba")

import numpy as np

from vsched_workers.backends.cpu.kernels import decode_attention as attention_kernels
from vsched_workers.backends.cpu.kernels import vectors as numba_vectors
from vsched_workers.backends.cpu.kernels.decode_attention import scored_type
from vsched_workers.backends.cpu.kernels.vectors import can_multiply

pytestmark = pytest.mark.slow

PAIRS = pytest.param(
    attention_kernels._attend_pairs,
    id="pairs",
    marks=pytest.mark.skipif(not can_multiply(), reason="the processor has no product of bfloat16"),
)
PLAIN = pytest.param(attention_kernels._attend_plain, id="plain")


def _halves(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint16).numpy()


@pytest.mark.parametrize("attend", [PAIRS, PLAIN])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [(1, 64, 16), (2, 64, 16), (3, 128, 32), (7, 128, 16), (2, 32, 16), (2, 64, 8)],
)
def test_row_attends_to_the_tokens_of_its_blocks(
    attend: Any, length: int, group: int, head_dim: int, block_size: int
) -> None:
    """Blocks lie anywhere; what lies behind the last token is not read, whatever it is."""
    in_pairs = scored_type(head_dim, block_size).dtype == np.uint16
    if attend is attention_kernels._attend_pairs and not in_pairs:
        pytest.skip("such sizes go the plain way")
    torch.manual_seed(length)
    kv_heads, blocks, scaling = 3, 40, head_dim**-0.5
    first, stop = 1, 3
    keys, values = (torch.randn(blocks * block_size, kv_heads, head_dim).bfloat16() for _ in "kv")
    table = torch.randperm(blocks)[: -(-length // block_size)].int()
    slots = (table[:, None] * block_size + torch.arange(block_size)).flatten()
    for cached in (keys, values):
        cached[slots[length:]] = float("nan")
    slots = slots[:length]
    heads = (stop - first) * group
    query = torch.randn(heads, head_dim).bfloat16()
    summed = np.zeros((heads, head_dim), dtype=np.float32)
    attend(
        query.data_ptr(),
        _halves(keys),
        _halves(values),
        table.numpy(),
        first,
        stop,
        length,
        block_size,
        np.float32(scaling),
        summed,
    )
    seen, taken = (
        each[slots, first:stop].double().repeat_interleave(group, dim=1).transpose(0, 1)
        for each in (keys, values)
    )
    weights = (query.double()[:, None] @ seen.transpose(1, 2) * scaling).softmax(-1)
    wanted = (weights @ taken)[:, 0]
    assert torch.allclose(torch.from_numpy(summed).double(), wanted, atol=2e-5, rtol=1e-4)


def test_sizes_that_fill_vectors_are_scored_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of whole vectors of keys, and heads of whole panels of columns; elsewhere the plain way is compiled."""
    monkeypatch.setattr(attention_kernels, "can_multiply", lambda: True)
    assert scored_type(64, 16).dtype == np.uint16
    assert scored_type(128, 32).dtype == np.uint16
    assert scored_type(32, 16).dtype == np.float32
    assert scored_type(64, 8).dtype == np.float32
    monkeypatch.setattr(attention_kernels, "can_multiply", lambda: False)
    assert scored_type(64, 16).dtype == np.float32


def test_processor_is_asked_once_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask takes a third of a millisecond, and every step wants to know."""
    found = can_multiply()
    absent: Any = None
    monkeypatch.setattr(numba_vectors, "binding", absent)
    assert can_multiply() is found
