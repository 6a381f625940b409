"""Kernels for the heads of bfloat16 rows on the CPU: their norm, their rotation, the cache, and decode attention.

They take what the merged product of queries, keys and values has made, [rows, heads + 2 * kv heads, head dim]. For a
decode row one pass does everything up to the output product. Rows of prefill are written where the attention of whole
chunks wants them. See `kernels/elementwise.py` for rounding, addresses and threads.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from vsched_workers.backends.cpu.kernels.decode_attention import attend_row
from vsched_workers.backends.cpu.kernels.elementwise import halves, rounded, through
from vsched_workers.backends.cpu.kernels.numba_basics import as_float, compiled


@compiled()
def _turn(
    source_at: int, target_at: int, cos: Any, sin: Any, place: int, weight: Any, eps: Any
) -> None:
    """Write one head, normed where there are weights for it, and turned by the angles at `place`."""
    half = cos.shape[1]
    # Two arrays each: an index that has something added to it is not seen to be positive.
    source, more = halves(source_at, half), halves(source_at + 2 * half, half)
    target, rest = halves(target_at, half), halves(target_at + 2 * half, half)
    if len(weight):
        upper = weight[half:]
        total = np.float32(0.0)
        for index in range(half):
            first, second = as_float(source[index]), as_float(more[index])
            total += first * first + second * second
        scale = np.float32(1.0) / np.sqrt(total / np.float32(2 * half) + eps)
        for index in range(half):
            first = through(as_float(source[index]) * scale)
            target[index] = rounded(as_float(weight[index]) * first)
            second = through(as_float(more[index]) * scale)
            rest[index] = rounded(as_float(upper[index]) * second)
        source, more = target, rest
    for index in range(half):
        first, second = as_float(source[index]), as_float(more[index])
        along, across = as_float(cos[place, index]), as_float(sin[place, index])
        target[index] = rounded(through(first * along) - through(second * across))
        rest[index] = rounded(through(second * along) + through(first * across))


@compiled()
def _copy(source_at: int, target_at: int, count: int) -> None:
    source, target = halves(source_at, count), halves(target_at, count)
    for index in range(count):
        target[index] = source[index]


@compiled()
def _decode_row(
    qkv_at: int,
    row: int,
    kv_first: int,
    kv_stop: int,
    heads: int,
    cos: Any,
    sin: Any,
    slot: int,
    keys: Any,
    values: Any,
    table: Any,
    length: int,
    block_size: int,
    query_weight: Any,
    key_weight: Any,
    eps: Any,
    scaling: Any,
    out_at: int,
    like: Any,
) -> None:
    """Write some of a row's keys and values into the cache, and attend for the queries that share them."""
    kv_heads, head_dim = keys.shape[1], keys.shape[2]
    size, group = 2 * head_dim, heads // kv_heads
    row_at = qkv_at + row * (heads + 2 * kv_heads) * size
    for kv_head in range(kv_first, kv_stop):
        at = row_at + (heads + kv_head) * size
        place = (slot * kv_heads + kv_head) * size
        _turn(at, keys.ctypes.data + place, cos, sin, row, key_weight, eps)
        _copy(at + kv_heads * size, values.ctypes.data + place, head_dim)
    first, count = kv_first * group, (kv_stop - kv_first) * group
    summed = np.zeros((count, head_dim), dtype=np.float32)
    # What attention makes lies where the turned queries lay.
    row_at += first * size
    to = out_at + (row * heads + first) * size
    for head in range(count):
        _turn(row_at + head * size, to + head * size, cos, sin, row, query_weight, eps)
    attend_row(
        like, to, keys, values, table, kv_first, kv_stop, length, block_size, scaling, summed
    )
    for head in range(count):
        out = halves(to + head * size, head_dim)
        for index in range(head_dim):
            out[index] = rounded(summed[head, index])


@compiled()
def decode(
    qkv_at: int,
    rows: int,
    heads: int,
    cos: Any,
    sin: Any,
    slots: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    block_size: int,
    query_weight: Any,
    key_weight: Any,
    eps: Any,
    scaling: Any,
    out_at: int,
    parts: int,
    like: Any,
) -> None:
    """Attend for decode rows: from what the merged product made of them to what the output product takes.

    See `attend_row` for `like`.
    """
    share = keys.shape[1] // parts
    for task in range(rows * parts):
        row, first = task // parts, task % parts * share
        _decode_row(
            qkv_at,
            row,
            first,
            first + share,
            heads,
            cos,
            sin,
            slots[row],
            keys,
            values,
            tables[row],
            contexts[row],
            block_size,
            query_weight,
            key_weight,
            eps,
            scaling,
            out_at,
            like,
        )


@compiled(parallel=True)
def decode_parallel(
    qkv_at: int,
    rows: int,
    heads: int,
    cos: Any,
    sin: Any,
    slots: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    block_size: int,
    query_weight: Any,
    key_weight: Any,
    eps: Any,
    scaling: Any,
    out_at: int,
    parts: int,
    like: Any,
) -> None:
    """As `decode`, on all threads."""
    share = keys.shape[1] // parts
    for task in numba.prange(rows * parts):
        row, first = task // parts, task % parts * share
        _decode_row(
            qkv_at,
            row,
            first,
            first + share,
            heads,
            cos,
            sin,
            slots[row],
            keys,
            values,
            tables[row],
            contexts[row],
            block_size,
            query_weight,
            key_weight,
            eps,
            scaling,
            out_at,
            like,
        )


@compiled()
def _turn_row(
    qkv_at: int,
    row: int,
    heads: int,
    cos: Any,
    sin: Any,
    slot: int,
    keys: Any,
    values: Any,
    query_weight: Any,
    key_weight: Any,
    eps: Any,
    out_at: int,
    total: int,
) -> None:
    """Write the heads of a row to `out` [heads, total rows, head dim], keys and values into the cache too."""
    kv_heads, head_dim = keys.shape[1], keys.shape[2]
    size = 2 * head_dim
    row_at = qkv_at + row * (heads + 2 * kv_heads) * size
    to = out_at + row * size
    for head in range(heads):
        _turn(row_at + head * size, to + head * total * size, cos, sin, row, query_weight, eps)
    row_at += heads * size
    to += heads * total * size
    place = slot * kv_heads * size
    for head in range(kv_heads):
        at = to + head * total * size
        _turn(row_at + head * size, at, cos, sin, row, key_weight, eps)
        _copy(at, keys.ctypes.data + place + head * size, head_dim)
        value_at = row_at + (kv_heads + head) * size
        _copy(value_at, at + kv_heads * total * size, head_dim)
        _copy(value_at, values.ctypes.data + place + head * size, head_dim)


@compiled()
def turn(
    qkv_at: int,
    rows: int,
    heads: int,
    cos: Any,
    sin: Any,
    slots: Any,
    keys: Any,
    values: Any,
    query_weight: Any,
    key_weight: Any,
    eps: Any,
    out_at: int,
    total: int,
) -> None:
    """Write the heads of prefill rows to `out` [heads, total rows, head dim], and into the cache."""
    for row in range(rows):
        _turn_row(
            qkv_at,
            row,
            heads,
            cos,
            sin,
            slots[row],
            keys,
            values,
            query_weight,
            key_weight,
            eps,
            out_at,
            total,
        )


@compiled(parallel=True)
def turn_parallel(
    qkv_at: int,
    rows: int,
    heads: int,
    cos: Any,
    sin: Any,
    slots: Any,
    keys: Any,
    values: Any,
    query_weight: Any,
    key_weight: Any,
    eps: Any,
    out_at: int,
    total: int,
) -> None:
    """As `turn`, on all threads."""
    for row in numba.prange(rows):
        _turn_row(
            qkv_at,
            row,
            heads,
            cos,
            sin,
            slots[row],
            keys,
            values,
            query_weight,
            key_weight,
            eps,
            out_at,
            total,
        )


@compiled()
def _turn_patch(qkv_at: int, row: int, heads: int, cos: Any, sin: Any, out_at: int) -> None:
    """Write one row's queries and keys, turned in float32, and its values to [3 * heads, rows, head dim]."""
    rows, half = cos.shape
    size = 4 * half
    for head in range(2 * heads):
        source_at = qkv_at + (row * 3 * heads + head) * size
        target_at = out_at + (head * rows + row) * size
        source, more = halves(source_at, half), halves(source_at + 2 * half, half)
        target, rest = halves(target_at, half), halves(target_at + 2 * half, half)
        for index in range(half):
            first, second = as_float(source[index]), as_float(more[index])
            along, across = cos[row, index], sin[row, index]
            target[index] = rounded(first * along - second * across)
            rest[index] = rounded(second * along + first * across)
    for head in range(2 * heads, 3 * heads):
        source_at = qkv_at + (row * 3 * heads + head) * size
        _copy(source_at, out_at + (head * rows + row) * size, 2 * half)


@compiled()
def turn_patches(
    qkv_at: int, first: int, stop: int, heads: int, cos: Any, sin: Any, out_at: int
) -> None:
    """Write the heads of some rows to `out` [3 * heads, rows, head dim]; `qkv_at` is where row 0 would lie."""
    for row in range(first, stop):
        _turn_patch(qkv_at, row, heads, cos, sin, out_at)


@compiled(parallel=True)
def turn_patches_parallel(
    qkv_at: int, first: int, stop: int, heads: int, cos: Any, sin: Any, out_at: int
) -> None:
    """As `turn_patches`, on all threads."""
    for index in numba.prange(stop - first):
        _turn_patch(qkv_at, first + index, heads, cos, sin, out_at)


def warm_up(like: Any, *, threads: int) -> None:
    """Compile what a language model needs, so that the first request does not wait for it.

    Decode attention multiplies the type of `like`, see `kernels/decode_attention.py`.
    """
    halves_of = functools.partial(np.empty, dtype=np.uint16)
    one = np.float32(1.0)
    angles = halves_of((0, 1)), halves_of((0, 1))
    cache = halves_of((1, 1, 2)), halves_of((1, 1, 2))
    shared = (*angles, np.empty(0, dtype=np.int64), *cache)
    tables, contexts = np.empty((0, 1), dtype=np.int32), np.empty(0, dtype=np.int32)
    norms = halves_of(0), halves_of(0), one
    for attend in (decode, decode_parallel)[: 1 + (threads > 1)]:
        attend(0, 0, 1, *shared, tables, contexts, 1, *norms, one, 0, 1, like)
    for write in (turn, turn_parallel)[: 1 + (threads > 1)]:
        write(0, 0, 1, *shared, *norms, 0, 0)


def warm_up_patches(*, threads: int) -> None:
    """Compile what a vision tower needs."""
    angles = np.empty((0, 1), dtype=np.float32)
    for write in (turn_patches, turn_patches_parallel)[: 1 + (threads > 1)]:
        write(0, 0, 0, 1, angles, angles, 0)
