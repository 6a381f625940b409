"""Attention of decode rows and prefill chunks with one order of sums, over a paged cache in panels of 16 keys.

The result of a row is the same to the bit whatever other rows are in the batch (`model.deterministic`). For a query
row q and its visible keys, with bfloat16 operands (VDPBF16PS),

    s_t = q . k_t,   w_t = 2**(factor (s_t - max s)),   out = sum_t w_t v_t / sum_t w_t

A score is accumulated over pairs of head values, an output over pairs of keys, one pair after the other. Each step of
both is one instruction with one lane per key or column, so any number of rows can share a pass, and no compiler may
reorder the sums. The softmax of a row is the same code for all. Scores are float32; weights are rounded to bfloat16,
as in transformers' eager attention.

**Packing.** 16 consecutive slots are a panel; each KV head has

  keys    [head_dim / 2, 16, 2]      d0 d1 of key 0 | d0 d1 of key 1 | .. | d0 d1 of key 15
                                     d2 d3 of key 0 | d2 d3 of key 1 | ..
  values  [8, head_dim, 2]           v0[0] v1[0] | v0[1] v1[1] | .. | v0[head_dim-1] v1[head_dim-1]
                                     v2[0] v3[0] | v2[1] v3[1] | ..

`prefill_attention.py` packs contexts in a similar way in every step. Here a row is packed once, when it is written to
the cache. A KV block is a whole number of panels, so blocks are shared, moved and freed as without panels.

A task is a run of rows for one KV head: consecutive rows of a sequence, as in a chunk, or one decode row.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import LOG2_E, bf16_array, exp2, larger, narrow
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits
from vsched_workers.backends.cpu.kernels.gemm import PASS_ROWS, Pass
from vsched_workers.backends.cpu.kernels.prefill_attention import copy_pair, vectors_of
from vsched_workers.backends.cpu.kernels.rope import RopeRows, heads_of, no_rows, rope_head
from vsched_workers.backends.cpu.kernels.simd import LANES, LINE, LONG, InstructionWriter, cases
from vsched_workers.backends.cpu.kernels.thread_pool import spread

KEYS = LANES
"""Keys of a panel."""
RUN_QUERIES = 4 * PASS_ROWS
"""Maximum queries of a run: a panel is read once for all of them."""


# --- LLVM emitters ---


class _KeyPass(Pass):
    """Pass of some queries times some panels of keys at arbitrary addresses."""

    def _places(self, panel_at: Any, pair: Any) -> Sequence[Any]:
        return [self._writer.advance(at, pair, LINE) for at in panel_at]


class _ValuePass(Pass):
    """Pass of some rows of weights times some columns of the values of all panels."""

    def _places(self, panel_at: Any, pair: Any) -> Sequence[Any]:
        offsets_at, columns_at, pair_bytes = panel_at
        builder, writer = self._builder, self._writer
        pairs = KEYS // 2
        panel = builder.lshr(pair, ir.Constant(LONG, pairs.bit_length() - 1))
        within = builder.and_(pair, ir.Constant(LONG, pairs - 1))
        at = builder.add(columns_at, writer.load(writer.advance(offsets_at, panel, 8), LONG, 8))
        at = builder.add(at, builder.mul(within, pair_bytes))
        one = ir.Constant(LONG, 1)
        return [writer.advance(at, one, vector * LINE) for vector in range(self._vectors)]


_CASES = [8 * row + vectors for row in range(1, PASS_ROWS + 1) for vectors in (1, 2, 4)]


@emits(numba.void, *[numba.intp] * 9)
def _score_pass(
    builder: Any,
    rows: Any,
    panels: Any,
    rows_at: Any,
    row_bytes: Any,
    offsets_at: Any,
    keys_at: Any,
    pairs: Any,
    out_at: Any,
    out_bytes: Any,
) -> None:
    """Multiply 1 to 6 queries by the keys of 1, 2 or 4 panels; float32 results."""
    writer, one = InstructionWriter(builder), ir.Constant(LONG, 1)
    number = builder.add(builder.mul(rows, ir.Constant(LONG, 8)), panels)
    for case in cases(builder, number, _CASES):
        places = [
            builder.add(keys_at, writer.load(writer.advance(offsets_at, one, 8 * panel), LONG, 8))
            for panel in range(case % 8)
        ]
        score = _KeyPass(builder, case // 8, vectors=case % 8)
        sums = score.sums(rows_at, row_bytes, places, pairs)
        score.store(sums, out_at, out_bytes, float32=True)


@emits(numba.void, *[numba.intp] * 10)
def _combine_pass(
    builder: Any,
    rows: Any,
    vectors: Any,
    rows_at: Any,
    row_bytes: Any,
    offsets_at: Any,
    columns_at: Any,
    pair_bytes: Any,
    pairs: Any,
    out_at: Any,
    out_bytes: Any,
) -> None:
    """Multiply 1 to 6 rows of weights by 1, 2 or 4 vectors of columns of all values; float32 results."""
    number = builder.add(builder.mul(rows, ir.Constant(LONG, 8)), vectors)
    for case in cases(builder, number, _CASES):
        combine = _ValuePass(builder, case // 8, vectors=case % 8)
        sums = combine.sums(rows_at, row_bytes, (offsets_at, columns_at, pair_bytes), pairs)
        combine.store(sums, out_at, out_bytes, float32=True)


# --- writing ---


@compiled()
def _write_row(qkv_at: int, heads: Any, rows: RopeRows, row: int, keys: Any, values: Any) -> None:
    """Write the keys and values of a row into their panel of the cache."""
    kv_heads, head_dim = keys.shape[1], keys.shape[2]
    size, slot = 2 * head_dim, rows.slots[row]
    lane = slot % KEYS
    place = (slot - lane) * kv_heads * size
    source_at = qkv_at + (row * (heads.queries + 2 * kv_heads) + heads.queries) * size
    # The key after the last one has weight zero, but 0 * NaN is NaN, so its values must be finite.
    is_last = row + 1 == len(rows.slots) or rows.slots[row + 1] != slot + 1
    rotated = np.empty(head_dim, dtype=np.uint16)
    for _ in range(kv_heads):
        rope_head(source_at, rotated.ctypes.data, rows, row, heads.key_norm_at, heads)
        for pair in range(head_dim // 2):
            at = keys.ctypes.data + place + (pair * KEYS + lane) * 4
            copy_pair(rotated.ctypes.data + 4 * pair, at)
        given = bf16_array(source_at + kv_heads * size, head_dim)
        pairs_at = values.ctypes.data + place + lane // 2 * 2 * size
        pairs = bf16_array(pairs_at, 2 * head_dim)
        for index in range(head_dim):
            pairs[2 * index + lane % 2] = given[index]
        if is_last and lane % 2 == 0:
            for index in range(head_dim):
                pairs[2 * index + 1] = 0
        source_at += size
        place += KEYS * size


# --- attending ---


@compiled()
def _runs(tables: Any, contexts: Any, block_size: int, rows_max: int) -> Any:
    """Group the attending rows into runs: first row and stop row of each.

    A row continues a run if it sees the blocks of the row before it, and one token more.
    """
    runs = np.empty((len(contexts), 2), dtype=np.int64)
    count = 0
    for row in range(len(contexts)):
        if not contexts[row]:
            continue
        if count and runs[count - 1, 1] == row and row - runs[count - 1, 0] < rows_max:
            goes_on = contexts[row] == contexts[row - 1] + 1
            blocks = (contexts[row] + block_size - 1) // block_size
            for block in range(blocks if goes_on else 0):
                goes_on &= tables[row, block] == tables[row - 1, block]
            if goes_on:
                runs[count - 1, 1] = row + 1
                continue
        runs[count] = row, row + 1
        count += 1
    return runs[:count]


@compiled()
def _offsets(table: Any, panels: int, block_size: int, panel_bytes: int, offset: int) -> Any:
    """Offsets of the panels of a sequence, for the head whose part of a panel is at `offset`."""
    offsets = np.empty(panels, dtype=np.int64)
    for panel in range(panels):
        slot = table[panel * KEYS // block_size] * block_size + panel * KEYS % block_size
        offsets[panel] = slot // KEYS * panel_bytes + offset
    return offsets


@compiled()
def _score(queries: Any, offsets: Any, keys_at: int, scores: Any) -> None:
    """Write Q K^T for the keys of all panels."""
    rows, panel = len(queries), 0
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    while panel < len(offsets):
        left = len(offsets) - panel
        taken = 4 if left >= 4 else 2 if left >= 2 else 1
        row = 0
        for index in range(passes):
            count = (rows - row) // (passes - index)
            _score_pass(
                count,
                taken,
                queries.ctypes.data + row * queries.strides[0],
                queries.strides[0],
                offsets.ctypes.data + panel * 8,
                keys_at,
                queries.shape[1] // 2,
                scores.ctypes.data + row * scores.strides[0] + panel * KEYS * 4,
                scores.strides[0],
            )
            row += count
        panel += taken


@compiled()
def _softmax(scores: Any, weights: Any, seen: int, width: int, factor: Any) -> Any:
    """Write the weights 2**(factor (s_t - max s)) of a row's visible scores, and zeros up to `width`.

    Returns their sum.
    """
    highest = scores[0]
    for index in range(seen):
        highest = larger(highest, scores[index])
    total = np.float32(0.0)
    for index in range(seen):
        weight = exp2((scores[index] - highest) * factor)
        weights[index] = narrow(weight)
        total += weight
    unseen = weights[seen:width]
    for index in range(len(unseen)):
        unseen[index] = 0
    return total


@compiled()
def _combine(weights: Any, pairs: int, offsets: Any, values_at: int, summed: Any) -> None:
    """Write P V for all values."""
    rows, head_dim = summed.shape
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    column = 0
    while column < head_dim:
        vectors = vectors_of(head_dim - column)
        row = 0
        for index in range(passes):
            count = (rows - row) // (passes - index)
            _combine_pass(
                count,
                vectors,
                weights.ctypes.data + row * weights.strides[0],
                weights.strides[0],
                offsets.ctypes.data,
                values_at + column * 4,
                head_dim * 4,
                pairs,
                summed.ctypes.data + row * summed.strides[0] + column * 4,
                summed.strides[0],
            )
            row += count
        column += vectors * LANES


class _Rows(NamedTuple):
    """Arguments of `attend_rows`."""

    qkv_at: int
    out_at: int
    heads: npt.NDArray[Any]
    rows: RopeRows
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    tables: npt.NDArray[np.int32]
    contexts: npt.NDArray[np.int32]
    block_size: int


@compiled()
def _attend_run(given: _Rows, first: int, stop: int, kv_head: int) -> None:
    """Attend for a run of rows, `first` to `stop`, with the queries of one KV head."""
    heads, rows, keys = given.heads[0], given.rows, given.keys
    table, context, block_size = given.tables[first], given.contexts[first], given.block_size
    kv_heads, head_dim = keys.shape[1], keys.shape[2]
    size, group = 2 * head_dim, heads.queries // kv_heads
    row_bytes = (heads.queries + 2 * kv_heads) * size
    queries = np.empty(((stop - first) * group, head_dim), dtype=np.uint16)
    for query in range(len(queries)):
        row, head = first + query // group, kv_head * group + query % group
        source_at = given.qkv_at + row * row_bytes + head * size
        to_at = queries.ctypes.data + query * size
        rope_head(source_at, to_at, rows, row, heads.query_norm_at, heads)
    length = context + stop - first - 1
    panels = (length + KEYS - 1) // KEYS
    offsets = _offsets(table, panels, block_size, kv_heads * KEYS * size, kv_head * KEYS * size)
    # Rows are padded by one vector: with a power of two between them, the rows of a pass would
    # share few cache sets.
    scores = np.empty((len(queries), panels * KEYS + LANES), dtype=np.float32)
    _score(queries, offsets, keys.ctypes.data, scores)
    weights = np.empty((len(queries), panels * KEYS + 2 * LANES), dtype=np.uint16)
    totals = np.empty(len(queries), dtype=np.float32)
    width, factor = (length + 1) // 2 * 2, heads.scaling * LOG2_E
    for query in range(len(queries)):
        seen = context + query // group
        totals[query] = _softmax(scores[query], weights[query], seen, width, factor)
    summed = np.empty((len(queries), head_dim), dtype=np.float32)
    _combine(weights, width // 2, offsets, given.values.ctypes.data, summed)
    for query in range(len(queries)):
        row, head = first + query // group, kv_head * group + query % group
        out = bf16_array(given.out_at + (row * heads.queries + head) * size, head_dim)
        of_query, share = summed[query], np.float32(1.0) / totals[query]
        for index in range(head_dim):
            out[index] = narrow(of_query[index] * share)


@compiled()
def _write_rows(begin: int, stop: int, given: _Rows) -> None:
    for row in range(begin, stop):
        _write_row(given.qkv_at, given.heads[0], given.rows, row, given.keys, given.values)


@compiled()
def _attend_runs(begin: int, stop: int, runs: Any, given: _Rows) -> None:
    kv_heads = given.keys.shape[1]
    for task in range(begin, stop):
        first, behind = runs[task // kv_heads]
        _attend_run(given, first, behind, task % kv_heads)


@compiled()
def attend_rows(
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
) -> None:
    """Rotate the heads of rows, write keys and values into the cache, and attend.

    A row may see tokens of earlier rows. Arguments as in `decode_attention.decode`, but a row with a context of 0
    does not attend; `block_size` and the head dimension are multiples of 16.
    """
    given = _Rows(qkv_at, out_at, heads, rows, keys, values, tables, contexts, block_size)
    spread(pool, len(rows.slots), 4, _write_rows, (given,))
    kv_heads = keys.shape[1]
    runs = _runs(tables, contexts, block_size, max(RUN_QUERIES * kv_heads // heads[0].queries, 1))
    spread(pool, len(runs) * kv_heads, 1, _attend_runs, (runs, given))


def warm_up() -> None:
    """Compile `attend_rows` ahead of the first request."""
    cached, heads = np.empty((1, 1, 2), dtype=np.uint16), heads_of(1, 0, 0, 0.0, 1.0)
    tables, contexts = np.empty((0, 1), dtype=np.int32), np.empty(0, dtype=np.int32)
    attend_rows(0, 0, 0, heads, no_rows(), cached, cached, tables, contexts, LANES)
