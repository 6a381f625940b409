"""Decode attention of one row with the bfloat16 dot product (VDPBF16PS, `simd.py`), over a paged bfloat16 cache.

Same computation and rounding as `decode_attention_float.py`: products of bfloat16 are exact, and sums are float32.

16 keys are scored at a time. Their accumulators stay in registers and are reduced across lanes together, since 16
separate reductions would cost more than the products. Values are accumulated for up to four heads at a time that
share them.

Requires a head dimension that is a multiple of 64, and blocks that are multiples of 16 keys.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import LOG2_E
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits
from vsched_workers.backends.cpu.kernels.decode_attention_float import (
    RowContext,
    bend,
    prefetch_heads,
    softmax,
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
    cases,
)

KEYS = LANES
"""Keys that are scored at a time."""
COLUMNS = 4 * LANES
"""Columns of values that are accumulated at a time, for up to four heads: half of the registers."""


@emits(numba.void, *[numba.intp] * 5)
def _score_keys(
    builder: Any, query_at: Any, keys_at: Any, key_bytes: Any, vectors: Any, scores_at: Any
) -> None:
    """Write the scores of a query with 16 keys, `key_bytes` apart; a head has `vectors` vectors of pairs."""
    writer = InstructionWriter(builder)
    loop = Loop(builder, [ZEROS] * KEYS)
    query = writer.load(writer.advance(query_at, loop.index, LINE), BF16_PAIRS)
    first_at = writer.advance(keys_at, loop.index, LINE)
    sums = [
        writer.dot(total, query, writer.load(writer.advance(first_at, key_bytes, key), BF16_PAIRS))
        for key, total in enumerate(loop.carried)
    ]
    loop.end(sums, vectors)
    writer.store(_add_across(builder, sums), scores_at, 4)


def _add_across(builder: Any, vectors: list[Any]) -> Any:
    """Emit the lane sums of 16 vectors as one vector.

    Each round adds lanes that are `distance` apart, of two vectors at once, and packs both results into one vector:

      v0       a b c d      v1       e f g h           (4 lanes for brevity)
      lower    a e c g      upper    b f d h           shuffles of v0 and v1, distance 1
      sum      a+b  e+f  c+d  g+h                      one vector in place of two
    """
    distance = 1
    while len(vectors) > 1:
        lower, upper = [], []
        for lane in range(LANES):
            of_first = not lane & distance
            lower.append(lane if of_first else LANES + lane - distance)
            upper.append(lane + distance if of_first else LANES + lane)
        masks = [ir.Constant(ir.VectorType(WORD, LANES), each) for each in (lower, upper)]
        vectors = [
            builder.fadd(*(builder.shuffle_vector(one, other, mask) for mask in masks))
            for one, other in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        distance *= 2
    return vectors[0]


@emits(numba.void, *[numba.intp] * 8)
def _add_values(
    builder: Any,
    heads: Any,
    weights_at: Any,
    weight_bytes: Any,
    values_at: Any,
    value_bytes: Any,
    count: Any,
    sums_at: Any,
    sum_bytes: Any,
) -> None:
    """Add 64 columns of `count` values, times the weights of 1, 2 or 4 heads, to the accumulators of these heads."""
    writer, one = InstructionWriter(builder), ir.Constant(LONG, 1)
    vectors = range(COLUMNS // LANES)
    for head_count in cases(builder, heads, (1, 2, 4)):
        places = [
            writer.advance(writer.advance(sums_at, sum_bytes, head), one, vector * LINE)
            for head in range(head_count)
            for vector in vectors
        ]
        loop = Loop(builder, [writer.load(at, FLOATS, 4) for at in places])
        value_at = builder.add(values_at, builder.mul(loop.index, value_bytes))
        values = []
        for vector in vectors:
            at = writer.advance(value_at, one, vector * LINE // 2)
            values.append(builder.fpext(writer.load(at, BF16S), FLOATS))
        sums: list[Any] = []
        for head in range(head_count):
            at = writer.advance(writer.advance(weights_at, weight_bytes, head), loop.index, 4)
            weight = writer.broadcast(writer.load(at, ir.FloatType(), 4))
            for value in values:
                sums.append(writer.multiply_add(loop.carried[len(sums)], weight, value))
        loop.end(sums, count)
        for total, at in zip(sums, places, strict=True):
            writer.store(total, at, 4)


@compiled()
def _slot_of(table: Any, token: int, block_size: int) -> int:
    """Slot of a token; the other keys of its group of 16 follow it."""
    slot: int = table[token // block_size] * block_size + token % block_size
    return slot


@compiled()
def _prefetch_next(
    cached: Any, table: Any, first: int, length: int, block_size: int, kv_first: int, kv_stop: int
) -> None:
    """Prefetch the next keys or values."""
    following = first + KEYS
    if following < length:
        slot = _slot_of(table, following, block_size)
        for index in range(min(KEYS, length - following)):
            prefetch_heads(cached, slot + index, kv_first, kv_stop)


@compiled()
def _score(query_at: int, context: RowContext, scores: Any) -> None:
    """Write Q K^T for all keys to `scores` [heads, padded keys]."""
    keys, table, block_size = context.keys, context.table, context.block_size
    kv_first, kv_stop, length = context.kv_first, context.kv_stop, context.length
    heads, size = len(scores), 2 * keys.shape[2]
    group, slot_bytes = heads // (kv_stop - kv_first), keys.shape[1] * size
    for first in range(0, length, KEYS):
        at = keys.ctypes.data + _slot_of(table, first, block_size) * slot_bytes + kv_first * size
        _prefetch_next(keys, table, first, length, block_size, kv_first, kv_stop)
        for head in range(heads):
            to = scores.ctypes.data + (head * scores.shape[1] + first) * 4
            key_at = at + head // group * size
            _score_keys(query_at + head * size, key_at, slot_bytes, size // LINE, to)


@compiled()
def _combine(weights: Any, context: RowContext, summed: Any) -> None:
    """Add P V, with weights [heads, padded keys], to `summed` [heads, head_dim]."""
    values, table, block_size = context.values, context.table, context.block_size
    kv_first, kv_stop, length = context.kv_first, context.kv_stop, context.length
    heads, head_dim = summed.shape
    size, weight_bytes = 2 * head_dim, 4 * weights.shape[1]
    group, slot_bytes = heads // (kv_stop - kv_first), values.shape[1] * size
    for first in range(0, length, KEYS):
        at = values.ctypes.data + _slot_of(table, first, block_size) * slot_bytes + kv_first * size
        _prefetch_next(values, table, first, length, block_size, kv_first, kv_stop)
        count = min(KEYS, length - first)
        head = 0
        while head < heads:
            left = group - head % group
            taken = 4 if left >= 4 else 2 if left >= 2 else 1
            for column in range(0, head_dim, COLUMNS):
                _add_values(
                    taken,
                    weights.ctypes.data + head * weight_bytes + first * 4,
                    weight_bytes,
                    at + head // group * size + column * 2,
                    slot_bytes,
                    count,
                    summed.ctypes.data + (head * head_dim + column) * 4,
                    head_dim * 4,
                )
            head += taken


@compiled()
def attend_bf16(query_at: int, context: RowContext, scaling: Any, summed: Any) -> None:
    """Attend for bfloat16 queries [heads, head_dim]; adds to `summed`, float32 of the same shape."""
    # Scores after the last token of a block are undefined; the softmax leaves them out.
    width = (context.length + KEYS - 1) // KEYS * KEYS
    scores = np.empty((len(summed), width), dtype=np.float32)
    _score(query_at, context, scores)
    factor = scaling * LOG2_E
    if context.softcap > np.float32(0.0):
        factor = LOG2_E
        for head in range(len(summed)):
            bend(scores, head, context.length, scaling, context.softcap)
    for head in range(len(summed)):
        softmax(scores, head, context.first, context.length, factor)
    _combine(scores, context, summed)
