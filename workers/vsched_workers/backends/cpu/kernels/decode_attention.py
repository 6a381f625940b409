"""Decode attention over the paged KV cache: one query row per sequence, which attends to all its tokens.

The kernels walk the block tables: gathering each context first costs more than the attention.

`decode` serves fused layers in bfloat16: from the merged QKV product to the input of `o_proj`. `decode_queries` is
attention alone, for transformers' modules.

A task is a row, or a row's share of the KV heads if there are too few rows for the threads. For the query heads q_h
that share a KV head, over the tokens t of the row's blocks,

    s_t = q_h . k_t,    w = softmax(s),    out_h = sum_t w_t v_t          (all float32)

**bfloat16 pairs.** With VDPBF16PS, a bfloat16 cache and heads of a multiple of 32 values, the products take pairs
(`_attend_pairs`): of neighbouring values for scores, of neighbouring tokens for values, whose weights are rounded to
bfloat16, as for chunks. Otherwise everything is float32: the inner loops run over the contiguous values of one head,
so LLVM vectorizes them, and a key or value is widened once for two heads. With an int8 cache, scores are multiplied by
the scales of keys, and weights by the scales of values; otherwise the scale is a constant 1, which LLVM removes.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023).
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from vsched.types import KV_SCALE_BYTES
from vsched_workers.backends.cpu.kernels.bf16 import (
    LOG2_E,
    as_type_of,
    bf16_array,
    exp2,
    maximum,
    narrow,
    sink_of,
    soft_cap,
    widen,
)
from vsched_workers.backends.cpu.kernels.compilation import array_of, compiled, emits, kernel
from vsched_workers.backends.cpu.kernels.rope import (
    HEADS_TYPE,
    ROWS_TYPE,
    RopeRows,
    rope_head,
    write_head,
)
from vsched_workers.backends.cpu.kernels.simd import (
    BF16_PAIRS,
    BF16S,
    FLOATS,
    LANES,
    LINE,
    LONG,
    WORD,
    ZEROS,
    InstructionWriter,
    Loop,
    call_llvm,
    cases,
    has_bf16_dot,
    prefetch,
)
from vsched_workers.backends.cpu.kernels.thread_pool import spread


class RowContext(NamedTuple):
    """Context of one row's query heads.

    Attributes:
        keys: Key cache of a layer, [slots, kv heads, width of a head], float32, bfloat16 or int8.
        values: Value cache, likewise.
        table: Blocks of the row's sequence, int32, from the block of the first visible token on.
        first: First visible token, counted from the start of that block, as all tokens here.
        length: Tokens of these blocks up to the end of the sequence.
        block_size: Tokens per block; block b holds the slots from `b * block_size` on.
        kv_first: First of the KV heads of the queries.
        kv_stop: One past the last of them.
        softcap: Logit soft-cap; 0 for none.
        sinks_at: Address of the queries' attention sinks, float32; 0 for none.
    """

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    table: npt.NDArray[np.int32]
    first: int
    length: int
    block_size: int
    kv_first: int
    kv_stop: int
    softcap: np.float32
    sinks_at: int


@compiled()
def context_of(
    row: int, kv_first: int, kv_stop: int, keys: Any, values: Any, tables: Any, contexts: Any,
    block_size: int, window: int, softcap: Any, sinks_at: int,
) -> RowContext:  # fmt: skip
    """Context of a row's queries of some KV heads, without the blocks before its window; 0 for no window."""
    length = contexts[row]
    first = length - window if 0 < window < length else 0
    skipped = first // block_size
    before = skipped * block_size
    return RowContext(
        keys, values, tables[row][skipped:], first - before, length - before, block_size, kv_first,
        kv_stop, softcap, sinks_at,
    )  # fmt: skip


@compiled()
def softmax(scores: Any, head: int, context: RowContext, factor: Any) -> None:
    """Replace a head's scores s by their softmax 2**(factor (s_t - max s)) / sum; those before the window by 0.

    A sink adds to the sum.
    """
    # Slices: numba checks an index with an arbitrary start for negative values, one at a time.
    masked, attended = scores[head][: context.first], scores[head][context.first : context.length]
    for index in range(len(masked)):
        masked[index] = np.float32(0.0)
    highest = sink = sink_of(context.sinks_at, head, factor)
    for index in range(len(attended)):
        highest = maximum(highest, attended[index])
    total = exp2((sink - highest) * factor)
    for index in range(len(attended)):
        weight = exp2((attended[index] - highest) * factor)
        attended[index] = weight
        total += weight
    share = np.float32(1.0) / total
    for index in range(len(attended)):
        attended[index] *= share


@compiled()
def prefetch_heads(cached: Any, slot: int, kv_first: int, kv_stop: int) -> None:
    """Prefetch the heads of one slot: blocks are scattered, and hardware prefetching stops at page boundaries."""
    size = cached.shape[2] * cached.itemsize
    start = cached.ctypes.data + (slot * cached.shape[1] + kv_first) * size
    for line in range(0, (kv_stop - kv_first) * size, 64):
        prefetch(start + line)


def scale_of(cached: Any, slot: int, kv_head: int) -> Any:
    """Scale of a head's values in the cache."""
    raise NotImplementedError


@numba.extending.overload(scale_of, inline="always")
def _choose_scale(cached: Any, slot: Any, kv_head: Any) -> Any:
    chosen = _scale_of_int8 if cached.dtype == numba.int8 else _no_scale

    def scale(cached: Any, slot: Any, kv_head: Any) -> Any:
        return chosen(cached, slot, kv_head)

    return scale


@compiled()
def _no_scale(cached: Any, slot: int, kv_head: int) -> Any:
    return np.float32(1.0)


@compiled()
def _scale_of_int8(cached: Any, slot: int, kv_head: int) -> Any:
    _, kv_heads, width = cached.shape
    at = cached.ctypes.data + (slot * kv_heads + kv_head + 1) * width - KV_SCALE_BYTES
    return widen(bf16_array(at, 1)[0])


# Index whole arrays below: a slice would lose the knowledge that the last axis is contiguous, and
# with it vectorization. All heads of a slot are contiguous, so they are read together.


@compiled()
def _score_one(
    query: Any, head: int, keys: Any, at: int, kv_head: int, scores: Any, index: int
) -> None:
    total = np.float32(0.0)
    for value in range(query.shape[1]):
        total += query[head, value] * widen(keys[at, kv_head, value])
    scores[head, index] = total * scale_of(keys, at, kv_head)


@compiled()
def _score_two_by_two(
    query: Any, head: int, keys: Any, at: int, kv_head: int, scores: Any, index: int
) -> None:
    """Score two consecutive keys for two heads that share them: each key is widened once."""
    one = two = next_one = next_two = np.float32(0.0)
    for value in range(query.shape[1]):
        first, second = widen(keys[at, kv_head, value]), widen(keys[at + 1, kv_head, value])
        one += query[head, value] * first
        two += query[head, value] * second
        next_one += query[head + 1, value] * first
        next_two += query[head + 1, value] * second
    first_scale, second_scale = scale_of(keys, at, kv_head), scale_of(keys, at + 1, kv_head)
    scores[head, index] = one * first_scale
    scores[head, index + 1] = two * second_scale
    scores[head + 1, index] = next_one * first_scale
    scores[head + 1, index + 1] = next_two * second_scale


@compiled()
def _score(query: Any, context: RowContext, scores: Any) -> None:
    """Write the scores of the queries [heads, head_dim] with every key to `scores` [heads, length]."""
    keys, table, block_size = context.keys, context.table, context.block_size
    kv_first, kv_stop, length = context.kv_first, context.kv_stop, context.length
    heads = len(query)
    group = heads // (kv_stop - kv_first)
    for first in range(0, length, block_size):
        slot = table[first // block_size] * block_size - first
        next_block = min(first + block_size, length - 1) // block_size
        next_slot = table[next_block] * block_size - first
        stop = min(first + block_size, length)
        for index in range(first, stop - 1, 2):
            for more in range(2):
                prefetch_heads(keys, next_slot + index + more, kv_first, kv_stop)
            for kv_head in range(kv_first, kv_stop):
                head = (kv_head - kv_first) * group
                last = head + group - 1
                while head < last:
                    _score_two_by_two(query, head, keys, slot + index, kv_head, scores, index)
                    head += 2
                if head == last:
                    for more in range(2):
                        at = slot + index + more
                        _score_one(query, head, keys, at, kv_head, scores, index + more)
        for index in range(stop - (stop - first) % 2, stop):
            for head in range(heads):
                kv_head = kv_first + head // group
                _score_one(query, head, keys, slot + index, kv_head, scores, index)


@compiled()
def _weights_of_four(
    weights: Any, head: int, index: int, values: Any, at: int, kv_head: int
) -> tuple[Any, Any, Any, Any]:
    """Weights of four values for one head, times the scales of the values."""
    return (
        weights[head, index] * scale_of(values, at, kv_head),
        weights[head, index + 1] * scale_of(values, at + 1, kv_head),
        weights[head, index + 2] * scale_of(values, at + 2, kv_head),
        weights[head, index + 3] * scale_of(values, at + 3, kv_head),
    )


@compiled()
def _add_four(
    weights: Any, index: int, values: Any, at: int, kv_head: int, head: int, summed: Any
) -> None:
    """Add four values to the accumulators of one head, which are read and written once for all four."""
    one, two, three, four = _weights_of_four(weights, head, index, values, at, kv_head)
    for value in range(summed.shape[1]):
        summed[head, value] += (
            one * widen(values[at, kv_head, value])
            + two * widen(values[at + 1, kv_head, value])
            + three * widen(values[at + 2, kv_head, value])
            + four * widen(values[at + 3, kv_head, value])
        )


@compiled()
def _add_four_to_two(
    weights: Any, index: int, values: Any, at: int, kv_head: int, head: int, summed: Any
) -> None:
    """Like `_add_four`, for two heads that share the values: each value is widened once."""
    one, two, three, four = _weights_of_four(weights, head, index, values, at, kv_head)
    next_one, next_two, next_three, next_four = _weights_of_four(
        weights, head + 1, index, values, at, kv_head
    )
    for value in range(summed.shape[1]):
        first = widen(values[at, kv_head, value])
        second = widen(values[at + 1, kv_head, value])
        third = widen(values[at + 2, kv_head, value])
        fourth = widen(values[at + 3, kv_head, value])
        summed[head, value] += one * first + two * second + three * third + four * fourth
        summed[head + 1, value] += (
            next_one * first + next_two * second + next_three * third + next_four * fourth
        )


@compiled()
def _combine(weights: Any, context: RowContext, summed: Any) -> None:
    """Add every value, times its weight [heads, length], to `summed` [heads, head_dim]."""
    values, table, block_size = context.values, context.table, context.block_size
    kv_first, kv_stop, length = context.kv_first, context.kv_stop, context.length
    heads, head_dim = summed.shape
    group = heads // (kv_stop - kv_first)
    for first in range(0, length, block_size):
        slot = table[first // block_size] * block_size - first
        next_block = min(first + block_size, length - 1) // block_size
        next_slot = table[next_block] * block_size - first
        stop = min(first + block_size, length)
        for index in range(first, stop - 3, 4):
            for more in range(4):
                prefetch_heads(values, next_slot + index + more, kv_first, kv_stop)
            for kv_head in range(kv_first, kv_stop):
                head = (kv_head - kv_first) * group
                last = head + group - 1
                while head < last:
                    _add_four_to_two(weights, index, values, slot + index, kv_head, head, summed)
                    head += 2
                if head == last:
                    _add_four(weights, index, values, slot + index, kv_head, head, summed)
        for index in range(stop - (stop - first) % 4, stop):
            for head in range(heads):
                kv_head = kv_first + head // group
                weight = weights[head, index] * scale_of(values, slot + index, kv_head)
                for value in range(head_dim):
                    summed[head, value] += weight * widen(values[slot + index, kv_head, value])


@compiled()
def attend_float(query: Any, context: RowContext, summed: Any) -> None:
    """Attend for float32 queries [heads, head_dim], already scaled; adds to `summed`."""
    heads = len(query)
    scores = np.empty((heads, context.length), dtype=np.float32)
    _score(query, context, scores)
    for head in range(heads):
        if context.softcap > np.float32(0.0):
            soft_cap(scores[head], context.length, np.float32(1.0), context.softcap)
        softmax(scores, head, context, LOG2_E)
    _combine(scores, context, summed)


@compiled()
def attend_widened(query: Any, context: RowContext, scaling: Any, summed: Any) -> None:
    """Attend for queries [heads, head_dim] in float32; adds to `summed`, float32 [heads, values of a head]."""
    scaled = np.empty(query.shape, dtype=np.float32)
    for head in range(len(query)):
        for index in range(query.shape[1]):
            scaled[head, index] = widen(query[head, index]) * scaling
    attend_float(scaled, context, summed)


# --- bfloat16 pairs ---

PAIR_HEADS = 4
"""Query heads that share the loads of keys and values: two accumulators each hide the latency of VDPBF16PS."""
_LOWER = [
    lane + half for lane in range(0, 32, 8) for each in range(4) for half in (each, 32 + each)
]
_UPPER = [each + 4 for each in _LOWER]
"""Interleaving of two vectors of bfloat16 within their lanes of 128 bits, by one instruction each (VPUNPCK)."""
_ORDERED = [
    [16 * (lane % 8 >= 4) + 4 * (lane // 8) + lane % 4 for lane in range(first, first + LANES)]
    for first in (0, LANES)
]
"""Order of the sums of `_LOWER` and `_UPPER` by values of the head."""


def _shuffled(builder: Any, first: Any, second: Any, order: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(WORD, len(order)), order)
    return builder.shuffle_vector(first, second, mask)


@emits(numba.void, *[numba.intp] * 10)
def _score_tokens(
    builder: Any,
    heads: Any,
    vectors: Any,
    query_at: Any,
    query_bytes: Any,
    key_at: Any,
    key_bytes: Any,
    tokens: Any,
    ahead_at: Any,
    scores_at: Any,
    scores_bytes: Any,
) -> None:
    """Write the scores of 1 to 4 heads, bfloat16, with consecutive keys of `vectors` vectors.

    The keys at `ahead_at` are prefetched: blocks are scattered, and hardware prefetching stops at page boundaries.
    """
    writer = InstructionWriter(builder)
    single = ir.FloatType()
    nothing, reduce = ir.Constant(single, 0.0), "llvm.vector.reduce.fadd.v16f32"
    for count in cases(builder, heads, range(1, PAIR_HEADS + 1)):
        token = Loop(builder, [])
        row = builder.mul(token.index, key_bytes)
        row_at, row_ahead_at = builder.add(key_at, row), builder.add(ahead_at, row)
        vector = Loop(builder, [ZEROS] * count)
        offset = builder.mul(vector.index, ir.Constant(LONG, LINE))
        writer.prefetch(builder.add(row_ahead_at, offset), locality=3)
        key = writer.load(builder.add(row_at, offset), BF16_PAIRS)
        sums = []
        for head, total in enumerate(vector.carried):
            at = builder.add(writer.advance(query_at, query_bytes, head), offset)
            sums.append(writer.dot(total, writer.load(at, BF16_PAIRS), key))
        vector.end(sums, vectors)
        for head, total in enumerate(sums):
            score = call_llvm(builder, reduce, single, nothing, total, fastmath=("fast",))
            at = writer.advance(scores_at, scores_bytes, head)
            writer.store(score, builder.add(at, builder.mul(token.index, ir.Constant(LONG, 4))), 4)
        token.end([], tokens)


@emits(numba.void, *[numba.intp] * 10)
def _add_pairs(
    builder: Any,
    heads: Any,
    vectors: Any,
    weights_at: Any,
    weights_bytes: Any,
    value_at: Any,
    value_bytes: Any,
    pairs: Any,
    ahead_at: Any,
    summed_at: Any,
    summed_bytes: Any,
) -> None:
    """Add pairs of consecutive values, times their bfloat16 weights, to the float32 sums of 1 to 4 heads.

    The values at `ahead_at` are prefetched.
    """
    writer = InstructionWriter(builder)
    for count in cases(builder, heads, range(1, PAIR_HEADS + 1)):
        vector = Loop(builder, [])
        column = builder.mul(vector.index, ir.Constant(LONG, LINE))
        pair = Loop(builder, [ZEROS] * (2 * count))
        two_rows = builder.mul(value_bytes, ir.Constant(LONG, 2))
        place = builder.add(column, builder.mul(pair.index, two_rows))
        row_at, row_ahead_at = builder.add(value_at, place), builder.add(ahead_at, place)
        writer.prefetch(row_ahead_at, locality=3)
        writer.prefetch(builder.add(row_ahead_at, value_bytes), locality=3)
        first = writer.load(row_at, BF16_PAIRS)
        second = writer.load(builder.add(row_at, value_bytes), BF16_PAIRS)
        both = [_shuffled(builder, first, second, order) for order in (_LOWER, _UPPER)]
        sums = []
        for head in range(count):
            at = writer.advance(weights_at, weights_bytes, head)
            at = builder.add(at, builder.mul(pair.index, ir.Constant(LONG, 4)))
            weight = builder.bitcast(writer.broadcast(writer.load(at, WORD)), BF16_PAIRS)
            totals = pair.carried[2 * head : 2 * head + 2]
            sums += [
                writer.dot(total, weight, each) for total, each in zip(totals, both, strict=True)
            ]
        pair.end(sums, pairs)
        to = builder.add(summed_at, builder.mul(vector.index, ir.Constant(LONG, 2 * LINE)))
        for head in range(count):
            for part, order in enumerate(_ORDERED):
                at = builder.add(
                    writer.advance(to, summed_bytes, head), ir.Constant(LONG, part * LINE)
                )
                added = _shuffled(builder, sums[2 * head], sums[2 * head + 1], order)
                writer.store(builder.fadd(writer.load(at, FLOATS, 4), added), at, 4)
        vector.end([], vectors)


@emits(numba.void, numba.intp, numba.intp)
def _narrow_vector(builder: Any, from_at: Any, to_at: Any) -> None:
    """Round 16 float32 to bfloat16."""
    writer = InstructionWriter(builder)
    writer.store(builder.fptrunc(writer.load(from_at, FLOATS, 4), BF16S), to_at)


@compiled()
def _score_pairs(query_at: int, context: RowContext, scores: Any) -> None:
    """Write the scores of bfloat16 queries [heads, head_dim] with every key to `scores` [heads, width]."""
    keys, table, block_size = context.keys, context.table, context.block_size
    kv_first, kv_stop, length = context.kv_first, context.kv_stop, context.length
    size, heads = 2 * keys.shape[2], len(scores)
    group = heads // (kv_stop - kv_first)
    for first in range(0, length, block_size):
        slot = table[first // block_size] * block_size
        stop = min(first + block_size, length)
        ahead = (table[min(stop, length - 1) // block_size] * block_size - slot) * keys.strides[0]
        head = 0
        while head < heads:
            kv_head = kv_first + head // group
            count = min(PAIR_HEADS, group - head % group)
            key_at = keys.ctypes.data + (slot * keys.shape[1] + kv_head) * size
            to = scores.ctypes.data + head * scores.strides[0] + 4 * first
            _score_tokens(
                count, size // LINE, query_at + head * size, size, key_at, keys.strides[0],
                stop - first, key_at + ahead, to, scores.strides[0],
            )  # fmt: skip
            head += count


@compiled()
def _combine_pairs(scores: Any, weights: Any, context: RowContext, summed: Any) -> None:
    """Add every value, times its weight [heads, width], to `summed` [heads, head_dim]; odd ones in float32."""
    values, table, block_size = context.values, context.table, context.block_size
    kv_first, kv_stop, length = context.kv_first, context.kv_stop, context.length
    heads, head_dim = summed.shape
    group, size = heads // (kv_stop - kv_first), 2 * head_dim
    for first in range(0, length, block_size):
        slot = table[first // block_size] * block_size
        stop = min(first + block_size, length)
        ahead = (table[min(stop, length - 1) // block_size] * block_size - slot) * values.strides[0]
        pairs, last = (stop - first) // 2, slot + stop - 1 - first
        head = 0
        while head < heads:
            kv_head = kv_first + head // group
            count = min(PAIR_HEADS, group - head % group)
            if pairs:
                value_at = values.ctypes.data + (slot * values.shape[1] + kv_head) * size
                weights_at = weights.ctypes.data + head * weights.strides[0] + 2 * first
                to = summed.ctypes.data + head * summed.strides[0]
                _add_pairs(
                    count, size // LINE, weights_at, weights.strides[0], value_at,
                    values.strides[0], pairs, value_at + ahead, to, summed.strides[0],
                )  # fmt: skip
            if (stop - first) % 2:
                for each in range(head, head + count):
                    weight = scores[each, stop - 1]
                    for value in range(head_dim):
                        summed[each, value] += weight * widen(values[last, kv_head, value])
            head += count


@compiled()
def _attend_pairs(query: Any, context: RowContext, scaling: Any, summed: Any) -> None:
    """Attend as `attend_widened`, with bfloat16 pairs."""
    heads = len(query)
    if query.shape[1] % (2 * LANES) or summed.shape[1] % (2 * LANES):
        attend_widened(query, context, scaling, summed)
        return
    width = (context.length + LANES - 1) // LANES * LANES
    scores = np.empty((heads, width), dtype=np.float32)
    weights = np.empty((heads, width), dtype=np.uint16)
    _score_pairs(query.ctypes.data, context, scores)
    factor = scaling * LOG2_E
    for head in range(heads):
        if context.softcap > np.float32(0.0):
            soft_cap(scores[head], context.length, scaling, context.softcap)
            factor = LOG2_E
        softmax(scores, head, context, factor)
        for index in range(0, width, LANES):
            _narrow_vector(
                scores[head].ctypes.data + 4 * index, weights[head].ctypes.data + 2 * index
            )
    _combine_pairs(scores, weights, context, summed)


def attend_rows(query: Any, context: RowContext, scaling: Any, summed: Any) -> None:
    """Attend as `attend_widened`, in the form of the processor, the queries and the cache."""
    raise NotImplementedError


@numba.extending.overload(attend_rows)
def _choose_attend(query: Any, context: Any, scaling: Any, summed: Any) -> Any:
    keys = context.types[context.fields.index("keys")]
    pairs = query.dtype == keys.dtype == numba.uint16 and has_bf16_dot()
    chosen = _attend_pairs if pairs else attend_widened

    def attend(query: Any, context: Any, scaling: Any, summed: Any) -> None:
        chosen(query, context, scaling, summed)

    return attend


# --- rows of a step ---


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
def _write_row(row: int, arguments: _Decode, kv_first: int, kv_stop: int) -> None:
    """Write a row's keys and values of some KV heads into the cache."""
    heads, rows, keys, values = arguments.heads[0], arguments.rows, arguments.keys, arguments.values
    kv_heads, head_dim = keys.shape[1], 2 * rows.cos.shape[1]
    slot, size = rows.slots[row], 2 * head_dim
    row_at = arguments.qkv_at + row * (heads.queries + 2 * kv_heads) * size
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
def _decode_share(task: int, arguments: _Decode) -> None:
    """Attend for the queries of a row that share some of the KV heads; see `decode`."""
    heads, rows, contexts, block_size = (
        arguments.heads[0],
        arguments.rows,
        arguments.contexts,
        arguments.block_size,
    )
    kv_heads, head_dim = arguments.keys.shape[1], 2 * rows.cos.shape[1]
    share = kv_heads // arguments.shares
    row, kv_first = task // arguments.shares, task % arguments.shares * share
    if contexts[row] == 0:
        return
    context = context_of(
        row, kv_first, kv_first + share, arguments.keys, arguments.values, arguments.tables,
        contexts, block_size, heads.window, heads.softcap, 0,
    )  # fmt: skip
    if not arguments.is_written:
        _write_row(row, arguments, kv_first, kv_first + share)
    size, group = 2 * head_dim, heads.queries // kv_heads
    first, count = kv_first * group, share * group
    summed = np.zeros((count, head_dim), dtype=np.float32)
    # Rotated queries use the space of the output.
    source_at = arguments.qkv_at + (row * (heads.queries + 2 * kv_heads) + first) * size
    to = arguments.out_at + (row * heads.queries + first) * size
    for head in range(count):
        at = source_at + head * size
        rope_head(at, to + head * size, rows, row, heads.query_norm_at, heads)
    attend_rows(bf16_array(to, (count, head_dim)), context, heads.scaling, summed)
    for head in range(count):
        out = bf16_array(to + head * size, head_dim)
        for index in range(head_dim):
            out[index] = narrow(summed[head, index])


@kernel(
    *[numba.int64] * 3,
    HEADS_TYPE,
    ROWS_TYPE,
    None,
    None,
    array_of(np.int32, 2),
    array_of(np.int32),
    *[numba.int64] * 2,
)
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
    arguments = _Decode(
        qkv_at, out_at, heads, rows, keys, values, tables, contexts, block_size, shares, is_written
    )
    if is_written:
        spread(pool, count, 4, _write_row, (arguments, 0, keys.shape[1]))
    spread(pool, count * shares, 1, _decode_share, (arguments,))


class QueryRule(NamedTuple):
    """Score rule of `decode_queries`.

    Attributes:
        scaling: Factor of the scores, float32.
        window: Tokens that a row attends to, itself included; 0 for no limit.
        softcap: Logit soft-cap, float32; 0 for none.
        sinks: Attention sinks, float32 [heads], or empty.
    """

    scaling: np.float32
    window: int
    softcap: np.float32
    sinks: npt.NDArray[np.float32]


RULE_TYPE = numba.typeof(QueryRule(np.float32(0), 0, np.float32(0), np.empty(0, np.float32)))


@compiled()
def _attend_share(
    task: int,
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    block_size: int,
    rule: QueryRule,
    shares: int,
    out: Any,
) -> None:
    """Attend for the queries of a row that share some of the KV heads; see `decode_queries`."""
    (_, heads, value_dim), kv_heads = out.shape, keys.shape[1]
    share, group = kv_heads // shares, heads // kv_heads
    row, kv_first = task // shares, task % shares * share
    first, count = kv_first * group, share * group
    sinks_at = rule.sinks.ctypes.data + 4 * first if len(rule.sinks) else 0
    context = context_of(
        row, kv_first, kv_first + share, keys, values, tables, contexts, block_size, rule.window,
        rule.softcap, sinks_at,
    )  # fmt: skip
    summed = np.zeros((count, value_dim), dtype=np.float32)
    attend_rows(query[row, first : first + count], context, rule.scaling, summed)
    for head in range(count):
        for value in range(value_dim):
            out[row, first + head, value] = as_type_of(out[0, 0, 0], summed[head, value])


@kernel(
    *(numba.int64, None, None, None, array_of(np.int32, 2), array_of(np.int32)),
    *(numba.int64, RULE_TYPE, numba.int64, None),
)
def decode_queries(
    pool: int,
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    block_size: int,
    rule: QueryRule,
    shares: int,
    out: Any,
) -> None:
    """Attend for query rows whose keys and values are already in the cache.

    Shape: query [rows, heads, key dim] and out [rows, heads, value dim], float32 or bfloat16; keys, values float32,
    bfloat16 or int8 [slots, kv heads, width of a head]; tables int32 [rows, blocks]; contexts int32 [rows]. `shares` as
    in `decode`.
    """
    arguments = query, keys, values, tables, contexts, block_size, rule, shares, out
    spread(pool, len(query) * shares, 1, _attend_share, arguments)
