"""Decode attention over the paged KV cache: one query row per sequence, which attends to all its tokens.

The kernels walk the block tables: gathering each context first costs more than the attention.

`decode` serves fused layers in bfloat16: from the merged QKV product to the input of `o_proj`. `decode_queries` is
attention alone, for transformers' modules.

A task is a row, or a row's share of the KV heads if there are too few rows for the threads.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, narrow, widen
from vsched_workers.backends.cpu.kernels.compilation import compiled
from vsched_workers.backends.cpu.kernels.decode_attention_float import RowContext, attend_float
from vsched_workers.backends.cpu.kernels.rope import (
    RopeRows,
    heads_of,
    no_rows,
    rope_head,
    write_head,
)
from vsched_workers.backends.cpu.kernels.thread_pool import spread


@compiled()
def attend_widened(query_at: int, context: RowContext, scaling: Any, summed: Any) -> None:
    """Attend for bfloat16 queries [heads, head_dim] in float32; adds to `summed`, float32 of the same shape."""
    heads, head_dim = summed.shape
    query = np.empty((heads, head_dim), dtype=np.float32)
    for head in range(heads):
        given = bf16_array(query_at + head * 2 * head_dim, head_dim)
        for index in range(head_dim):
            query[head, index] = widen(given[index]) * scaling
    attend_float(query, context, summed)


class _Decode(NamedTuple):
    """Arguments of `decode`, and whether keys and values are already in the cache (`is_written`)."""

    qkv_at: int
    out_at: int
    heads: npt.NDArray[Any]
    rows: RopeRows
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    tables: npt.NDArray[np.int32]
    contexts: npt.NDArray[np.int32]
    block_size: int
    shares: int
    is_written: int


@compiled()
def _write_row(given: _Decode, row: int, kv_first: int, kv_stop: int) -> None:
    """Write a row's keys and values of some KV heads into the cache."""
    heads, rows, keys, values = given.heads[0], given.rows, given.keys, given.values
    kv_heads, head_dim = keys.shape[1], 2 * rows.cos.shape[1]
    slot, size = rows.slots[row], 2 * head_dim
    row_at = given.qkv_at + row * (heads.queries + 2 * kv_heads) * size
    turned = np.empty(head_dim, dtype=np.uint16)
    for kv_head in range(kv_first, kv_stop):
        at = row_at + (heads.queries + kv_head) * size
        rope_head(at, turned.ctypes.data, rows, row, heads.key_norm_at, heads)
        write_head(turned.ctypes.data, keys, slot, kv_head)
        write_head(at + kv_heads * size, values, slot, kv_head)


@compiled()
def _sees_another(rows: RopeRows, tables: Any, contexts: Any, block_size: int) -> bool:
    """Return True if a row attends to tokens that another row writes, as rows of draft tokens and of chunks do.

    So may rows next to one that does not attend.
    """
    for row in range(len(rows.slots)):
        if contexts[row] == 0:
            return True
    for row in range(1, len(rows.slots)):
        before = contexts[row] - 2
        if before >= 0:
            block = tables[row, before // block_size]
            if block * block_size + before % block_size == rows.slots[row - 1]:
                return True
    return False


@compiled()
def _decode_task(given: _Decode, row: int, context: RowContext) -> None:
    """Attend for the queries of a row that share some of the KV heads."""
    heads, rows = given.heads[0], given.rows
    kv_heads, head_dim = context.keys.shape[1], 2 * rows.cos.shape[1]
    size, group = 2 * head_dim, heads.queries // kv_heads
    row_at = given.qkv_at + row * (heads.queries + 2 * kv_heads) * size
    first, count = context.kv_first * group, (context.kv_stop - context.kv_first) * group
    summed = np.zeros((count, head_dim), dtype=np.float32)
    # Rotated queries use the space of the output.
    row_at += first * size
    to = given.out_at + (row * heads.queries + first) * size
    for head in range(count):
        source_at = row_at + head * size
        rope_head(source_at, to + head * size, rows, row, heads.query_norm_at, heads)
    attend_widened(to, context, heads.scaling, summed)
    for head in range(count):
        out = bf16_array(to + head * size, head_dim)
        for index in range(head_dim):
            out[index] = narrow(summed[head, index])


@compiled()
def _write_rows(begin: int, stop: int, given: _Decode) -> None:
    for row in range(begin, stop):
        _write_row(given, row, 0, given.keys.shape[1])


@compiled()
def _decode_tasks(begin: int, stop: int, given: _Decode) -> None:
    """Attend for shares of rows; see `decode`."""
    contexts, block_size, shares = given.contexts, given.block_size, given.shares
    size = given.keys.shape[1] // shares
    window, softcap = given.heads[0].window, given.heads[0].softcap
    for task in range(begin, stop):
        row, kv_first = task // shares, task % shares * size
        if contexts[row] == 0:
            continue
        unseen = contexts[row] - window if 0 < window < contexts[row] else 0
        skipped = unseen // block_size
        context = RowContext(
            given.keys,
            given.values,
            given.tables[row][skipped:],
            unseen - skipped * block_size,
            contexts[row] - skipped * block_size,
            block_size,
            kv_first,
            kv_first + size,
            softcap,
        )
        if not given.is_written:
            _write_row(given, row, kv_first, kv_first + size)
        _decode_task(given, row, context)


@compiled()
def decode(
    pool: int,
    qkv_at: int,
    out_at: int,
    heads: Any,
    rows: RopeRows,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    block_size: int,
    shares: int,
) -> None:
    """Rotate the heads of decode rows, write keys and values into the cache, and attend.

    If rows belong to different sequences, a task writes the keys and values that it reads, in one parallel region.
    Rows of draft tokens and of chunks see earlier rows, which another thread may compute; then everything is written
    before any row attends. A row's result has the same bits whatever other rows there are.

    Args:
        pool: Address of the thread pool's state, 0 for the calling thread.
        qkv_at: Merged QKV product, bfloat16 [rows, heads + 2 * kv heads, head_dim].
        out_at: Output, bfloat16 [rows, heads, head_dim].
        heads: Record of the layer's heads (`rope.heads_of`).
        rows: Positions of the rows.
        keys: Key cache of the layer, [slots, kv heads, width of a head].
        values: Value cache of the layer, likewise.
        tables: Block tables of the rows' sequences, int32 [rows, blocks].
        contexts: Tokens that a row attends to, itself included, int32 [rows]; a row with 0 only writes.
        block_size: Slots per block.
        shares: Number of shares of a row's KV heads, a divisor of their number; each is a task.
    """
    count = len(rows.slots)
    is_written = 1 if _sees_another(rows, tables, contexts, block_size) else 0
    given = _Decode(
        qkv_at,
        out_at,
        heads,
        rows,
        keys,
        values,
        tables,
        contexts,
        block_size,
        shares,
        is_written,
    )
    if is_written:
        spread(pool, count, 4, _write_rows, (given,))
    spread(pool, count * shares, 1, _decode_tasks, (given,))


class _Queries(NamedTuple):
    """Arguments of `decode_queries`."""

    query: npt.NDArray[np.float32]
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    tables: npt.NDArray[np.int32]
    contexts: npt.NDArray[np.int32]
    block_size: int
    scaling: np.float32
    shares: int
    out: npt.NDArray[np.float32]


@compiled()
def _attend_task(query: Any, row: int, context: RowContext, scaling: Any, out: Any) -> None:
    group, head_dim = query.shape[1] // context.keys.shape[1], query.shape[2]
    first, heads = context.kv_first * group, (context.kv_stop - context.kv_first) * group
    scaled = np.empty((heads, head_dim), dtype=np.float32)
    summed = np.zeros((heads, head_dim), dtype=np.float32)
    for head in range(heads):
        for value in range(head_dim):
            scaled[head, value] = query[row, first + head, value] * scaling
    attend_float(scaled, context, summed)
    for head in range(heads):
        for value in range(head_dim):
            out[row, first + head, value] = summed[head, value]


@compiled()
def _attend_tasks(begin: int, stop: int, given: _Queries) -> None:
    """Attend for shares of rows; see `decode_queries`."""
    shares = given.shares
    size = given.keys.shape[1] // shares
    for task in range(begin, stop):
        row, first = task // shares, task % shares * size
        context = RowContext(
            given.keys,
            given.values,
            given.tables[row],
            0,
            given.contexts[row],
            given.block_size,
            first,
            first + size,
            np.float32(0.0),
        )
        _attend_task(given.query, row, context, given.scaling, given.out)


@compiled()
def decode_queries(
    pool: int,
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    block_size: int,
    scaling: Any,
    shares: int,
    out: Any,
) -> None:
    """Attend for query rows whose keys and values are already in the cache.

    Shape: query, out float32 [rows, heads, head_dim]; keys, values float32, bfloat16 or int8 [slots, kv heads, width
    of a head]; tables int32 [rows, blocks]; contexts int32 [rows]. `shares` as in `decode`.
    """
    given = _Queries(query, keys, values, tables, contexts, block_size, scaling, shares, out)
    spread(pool, query.shape[0] * shares, 1, _attend_tasks, (given,))


def warm_up(cached: npt.NDArray[Any]) -> None:
    """Compile `decode` for a cache type, ahead of the first request."""
    heads = heads_of(1, 0, 0, 0.0, 1.0)
    tables, contexts = np.empty((0, 1), dtype=np.int32), np.empty(0, dtype=np.int32)
    decode(0, 0, 0, heads, no_rows(), cached, cached, tables, contexts, 1, 1)
