"""Decode attention on several threads, and of draft tokens of one sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("numba")

import numpy as np

from tests.workers.backends.cpu.kernels.operands import bits
from vsched_workers.backends.cpu.kernels.decode_attention import decode
from vsched_workers.backends.cpu.kernels.rope import RopeRows, heads_of
from vsched_workers.backends.cpu.threads import pool_of

pytestmark = pytest.mark.slow


HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 64, 16
NAN = float("nan")


class Rows(NamedTuple):
    """Arguments of `decode` for some rows, row by row."""

    qkv: torch.Tensor
    cos: Any
    sin: Any
    slots: Any
    tables: Any
    contexts: Any

    @classmethod
    def draw(cls, tables: Any, contexts: Any) -> Rows:
        """Return random queries, keys, values and angles of rows with these block tables and contexts."""
        count, last = len(contexts), contexts - 1
        blocks = tables[np.arange(count), last // BLOCK_SIZE].astype(np.int64)
        qkv = torch.randn(count, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16()
        angles = torch.rand(count, HEAD_DIM // 2) * 7
        cos, sin = (bits(each.bfloat16()) for each in (angles.cos(), angles.sin()))
        return cls(qkv, cos, sin, blocks * BLOCK_SIZE + last % BLOCK_SIZE, tables, contexts)

    def part(self, some: slice) -> Rows:
        """Return a part of the rows."""
        return Rows(*(each[some] for each in self))

    def attend(
        self, pool: int, keys: torch.Tensor, values: torch.Tensor, shares: int
    ) -> torch.Tensor:
        """Return the attention output; undefined values are NaN."""
        out = torch.full((len(self.qkv), HEADS, HEAD_DIM), NAN).bfloat16()
        decode(
            pool,
            self.qkv.data_ptr(),
            out.data_ptr(),
            heads_of(HEADS, 0, 0, 0.0, 0.125),
            RopeRows(self.cos, self.sin, self.slots),
            bits(keys),
            bits(values),
            self.tables,
            self.contexts,
            BLOCK_SIZE,
            shares,
        )
        return out


def _decode(pool: int, contexts: list[int], shares: int) -> list[torch.Tensor]:
    """Decode one row of each sequence; return the output, and the written keys and values.

    Everything else in the cache and the result is NaN.
    """
    torch.manual_seed(len(contexts))
    count = len(contexts)
    width = -(-max(contexts) // BLOCK_SIZE)
    tables = torch.randperm(count * width).int().view(count, width).numpy()
    keys, values = (
        torch.full((tables.size * BLOCK_SIZE, KV_HEADS, HEAD_DIM), NAN).bfloat16() for _ in "kv"
    )
    for table, length in zip(tables, contexts, strict=True):
        slots = (table[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).flatten()[: length - 1]
        for cached in (keys, values):
            cached[slots] = torch.randn(length - 1, KV_HEADS, HEAD_DIM).bfloat16()
    rows = Rows.draw(tables, np.array(contexts, dtype=np.int32))
    out = rows.attend(pool, keys, values, shares)
    return [out, keys[rows.slots], values[rows.slots]]


@pytest.mark.parametrize("contexts", [[1], [1, 16, 17, 100, 33], [40] * 30])
def test_decode_writes_keys_and_attends_on_all_threads_as_on_one(contexts: list[int]) -> None:
    wanted = _decode(0, contexts, 1)
    assert all(each.isfinite().all() for each in wanted)
    for shares in (1, 2):
        assert all(map(torch.equal, _decode(pool_of(2), contexts, shares), wanted))


def test_rows_of_one_sequence_see_each_other_on_all_threads() -> None:
    """Draft tokens: each row attends to earlier ones, which other threads may compute, as if it ran a step later."""
    torch.manual_seed(3)
    contexts = np.array([30, *range(393, 406), 7], dtype=np.int32)
    count, blocks = len(contexts), 26
    tables = torch.randperm(3 * blocks).int().view(3, blocks).numpy()
    kept = [torch.randn(3 * blocks * BLOCK_SIZE, KV_HEADS, HEAD_DIM).bfloat16() for _ in "kv"]
    rows = Rows.draw(tables[[0] + [1] * (count - 2) + [2]], contexts)
    for cached in kept:
        cached[rows.slots] = NAN

    def attend(pool: int, some: list[slice], shares: int) -> list[torch.Tensor]:
        keys, values = (cached.clone() for cached in kept)
        out = [rows.part(part).attend(pool, keys, values, shares) for part in some]
        return [torch.cat(out), keys, values]

    wanted = attend(0, [slice(row, row + 1) for row in range(count)], 1)
    assert all(each.isfinite().all() for each in wanted)
    for _ in range(20):  # a race may go well by chance
        for shares in (1, 2):
            assert all(map(torch.equal, attend(pool_of(2), [slice(count)], shares), wanted))
