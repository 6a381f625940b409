"""bfloat16 attention of many query rows: prefill chunks over the paged cache, and image patches.

For a query row q and its visible keys,

    s_t = q . k_t,   w_t = 2**(factor (s_t - max s)),   out = sum_t w_t v_t / sum_t w_t      (factor = scaling log2 e)

With bfloat16 operands (VDPBF16PS) scores and weights are rounded to bfloat16, as in transformers' eager attention;
with float32 operands only the result is rounded. Packed keys and values are bfloat16 in both cases.

**Packing.** Keys and values are packed once, straight from the paged cache, into GEMM panels (see `gemm.py`), for
each KV head and sequence:

  keys    [keys / 64, head_dim / 2, 64, 2]                      B of Q K^T: N = keys, K = head_dim
  values  per panel of c = 64, 32 or 16 columns [keys / 2, c, 2]  B of P V:   N = head_dim, K = keys

  keys, panel of keys 0 .. 63:         d0 d1 of key 0 | d0 d1 of key 1 | .. | d0 d1 of key 63
                                       d2 d3 of key 0 | d2 d3 of key 1 | ..
  values, panel of columns 0 .. c-1:   v0[0] v1[0] | v0[1] v1[1] | .. | v0[c-1] v1[c-1]      keys 0 and 1
                                       v2[0] v3[0] | v2[1] v3[1] | ..                        keys 2 and 3

Keys are padded to whole panels. Then 24 query rows at a time are multiplied by all visible keys, the softmax is taken
while the scores are in the cache, and the weights are multiplied by the values. Nothing is compiled for a specific
shape. The result of a row depends neither on the chunking of its prompt nor on other rows in the batch: masked keys add
exact zeros, and keys are summed in one order. With a sliding window this holds for float32 operands: bfloat16 pairs are
counted from the first key that the chunk sees.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import (
    NO_SCORE,
    as_type_of,
    bf16_array,
    exp2,
    maximum,
    narrow,
    sink_of,
    soft_cap,
    widen,
)
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits, kernel
from vsched_workers.backends.cpu.kernels.gemm import PANEL, PASS_ROWS, Pass
from vsched_workers.backends.cpu.kernels.simd import (
    FLOATS,
    LANES,
    LINE,
    LONG,
    WORD,
    WORDS,
    ZEROS,
    InstructionWriter,
    Loop,
    call_llvm,
    cases,
    constant,
    has_avx512,
    splat,
)
from vsched_workers.backends.cpu.kernels.thread_pool import spread

BLOCK = 4 * PASS_ROWS
"""Query rows of a block: each panel is read once for all of them, and their scores stay in the cache."""

PARALLEL_SCORES_MIN = 1 << 14
"""Minimum number of scores for several threads: waking them takes as long."""


class PrefillArguments(NamedTuple):
    """Arguments of prefill attention: sequences of one length; rows attend to keys of their own sequence.

    `..._at` is an address.

    Attributes:
        query_at: Queries, [heads, sequences, rows, head_dim]; heads are `query_head_bytes` apart.
        query_head_bytes: Bytes between heads.
        heads: Query heads, a multiple of `kv_heads`.
        sequences: Number of sequences.
        rows: Rows of each sequence, at least one.
        head_dim: A multiple of 16.
        keys_at: Keys. Those of head h and sequence s begin at `h * head_bytes + s * len(slots) * slot_bytes`.
        values_at: Values, in the layout of keys.
        slot_bytes: Bytes between slots.
        head_bytes: Bytes between KV heads.
        kv_heads: KV heads.
        slots: Slots of a sequence's keys, int64 [keys].
        packed_at: Buffer for packed keys and values, `4 * kv_heads * sequences * padded_keys * head_dim` bytes, at a
            multiple of 64; AMX kernels pad `head_dim` to 32.
        padded_keys: Keys of a sequence, padded to whole panels.
        causal: 1: the last row sees all keys, and each row one key less than the next. 0: all rows see all keys.
        window: Sliding window: maximum keys that a row sees, its own included; 0 for no limit.
        factor: float32, scaling log2(e): scores times this are base-2 exponents.
        softcap: Logit soft-cap of these exponents; 0 for none.
        sinks_at: Attention sinks, float32 [heads]; 0 for none.
        out_at: Result, [sequences, rows, heads, head_dim].
        tag: Dtype tag of the operands.
    """

    query_at: int
    query_head_bytes: int
    heads: int
    sequences: int
    rows: int
    head_dim: int
    keys_at: int
    values_at: int
    slot_bytes: int
    head_bytes: int
    kv_heads: int
    slots: npt.NDArray[np.int64]
    packed_at: int
    padded_keys: int
    causal: int
    window: int
    factor: np.float32
    softcap: np.float32
    sinks_at: int
    out_at: int
    tag: npt.NDArray[Any]


# --- LLVM emitters ---


@emits(numba.void, None, None, *[numba.intp] * 7)
def _multiply(
    builder: Any,
    kind: Any,
    out_kind: Any,
    vectors: Any,
    rows_at: Any,
    row_bytes: Any,
    panel_at: Any,
    pairs: Any,
    out_at: Any,
    out_bytes: Any,
) -> None:
    """Multiply six rows by a panel of 1, 2 or 4 vectors; the kinds are the types of rows and results.

    16 registers of 256 bits hold the accumulators of six rows and one vector, so vectors follow each other there.
    """
    float32, out_float32 = (isinstance(each, numba.types.Float) for each in (kind, out_kind))
    for count in cases(builder, vectors, (1, 2, 4)):
        together = count if has_avx512() else 1
        for first in range(0, count, together):
            one = Pass(builder, PASS_ROWS, vectors=together, panel_vectors=count, float32=float32)
            weights_at = builder.add(panel_at, ir.Constant(LONG, first * LINE))
            place = ir.Constant(LONG, first * LANES * (4 if out_float32 else 2))
            sums = one.sums(rows_at, row_bytes, weights_at, pairs)
            one.store(sums, builder.add(out_at, place), out_bytes, float32=out_float32)


@emits(numba.void, *[numba.intp] * 3)
def interleave(builder: Any, first_at: Any, second_at: Any, to_at: Any) -> None:
    """Write a vector of pairs: lane i holds value i of the first row and value i of the second."""
    writer = InstructionWriter(builder)
    narrow_type, wide_type = (ir.VectorType(kind, LANES) for kind in (ir.IntType(16), WORD))
    first, second = (
        builder.zext(writer.load(at, narrow_type), wide_type) for at in (first_at, second_at)
    )
    upper = builder.shl(second, splat(wide_type, 16))
    writer.store(builder.or_(first, upper), to_at, 4)


@emits(numba.void, numba.intp, numba.intp)
def copy_pair(builder: Any, from_at: Any, to_at: Any) -> None:
    """Copy two neighbouring bfloat16 values."""
    writer = InstructionWriter(builder)
    writer.store(writer.load(from_at, WORD), to_at)


# --- packing ---


@compiled()
def vectors_of(columns: int) -> int:
    """Vectors of the next panel of values, given the remaining columns."""
    return 4 if columns >= 4 * LANES else 2 if columns >= 2 * LANES else 1


@compiled()
def _pack_keys(first_at: int, second_at: int, head_dim: int, to_at: int) -> None:
    """Write two keys as neighbouring columns of a panel."""
    for pair in range(head_dim // 2):
        at = to_at + pair * PANEL * 4
        copy_pair(first_at + 4 * pair, at)
        copy_pair(second_at + 4 * pair, at + 4)


@compiled()
def _pack_values(
    first_at: int, second_at: int, head_dim: int, pair: int, padded_keys: int, to_at: int
) -> None:
    """Write the values of two keys as one line of every panel of values."""
    column = 0
    while column < head_dim:
        vectors = vectors_of(head_dim - column)
        at = to_at + padded_keys * column * 2 + pair * vectors * LINE
        for vector in range(vectors):
            offset = 2 * (column + vector * LANES)
            interleave(first_at + offset, second_at + offset, at + vector * LINE)
        column += vectors * LANES


# Inlined: as a call it would copy all arguments for each pair of keys, 5 % of the time of short
# sequences.
@compiled(inline="always")
def two_keys(arguments: PrefillArguments, start: int, index: int, padding_at: int) -> Any:
    """Addresses of a key and the next one, and of their values; `padding_at` beyond the last key.

    `start` is the offset of the keys of the sequence.
    """
    first_key = second_key = first_value = second_value = padding_at
    if index < len(arguments.slots):
        offset = start + arguments.slots[index] * arguments.slot_bytes
        first_key, first_value = arguments.keys_at + offset, arguments.values_at + offset
    if index + 1 < len(arguments.slots):
        offset = start + arguments.slots[index + 1] * arguments.slot_bytes
        second_key, second_value = arguments.keys_at + offset, arguments.values_at + offset
    return first_key, second_key, first_value, second_value


@compiled()
def _pack_panel(task: int, arguments: PrefillArguments) -> None:
    """Pack the keys of one panel and their values, with zeros for padded keys."""
    panels, row_bytes = arguments.padded_keys // PANEL, 2 * arguments.head_dim
    packed, panel = task // panels, task % panels
    head, sequence = packed // arguments.sequences, packed % arguments.sequences
    start = head * arguments.head_bytes + sequence * len(arguments.slots) * arguments.slot_bytes
    keys_at = arguments.packed_at + packed * 2 * arguments.padded_keys * row_bytes
    padding = np.zeros(arguments.head_dim, dtype=np.uint16)
    for index in range(panel * PANEL, (panel + 1) * PANEL, 2):
        first_key, second_key, first_value, second_value = two_keys(
            arguments, start, index, padding.ctypes.data
        )
        column_at = keys_at + panel * PANEL * row_bytes + index % PANEL * 4
        _pack_keys(first_key, second_key, arguments.head_dim, column_at)
        values_at = keys_at + arguments.padded_keys * row_bytes
        _pack_values(
            first_value,
            second_value,
            arguments.head_dim,
            index // 2,
            arguments.padded_keys,
            values_at,
        )


# --- attending ---


@emits(numba.float32, numba.intp, numba.intp)
def _highest(builder: Any, scores_at: Any, steps: Any) -> Any:
    """Maximum of `steps` vectors of bfloat16 scores, 32 each."""
    writer = InstructionWriter(builder)
    loop = Loop(builder, [constant(float(NO_SCORE))] * 2)
    words = writer.load(writer.advance(scores_at, loop.index, LINE), WORDS)
    # The even and the odd scores: a bfloat16 is the upper half of a float32.
    even = builder.shl(words, splat(WORDS, 16))
    halves = even, builder.and_(words, splat(WORDS, 0xFFFF0000))
    pairs = zip((builder.bitcast(each, FLOATS) for each in halves), loop.carried, strict=True)
    loop.end(found := [writer.maximum(*pair) for pair in pairs], steps)
    name = f"llvm.vector.reduce.fmax.v{LANES}f32"
    return call_llvm(builder, name, ir.FloatType(), writer.maximum(*found))


@emits(numba.float32, numba.intp, numba.intp, numba.float32, numba.float32)
def _weigh(builder: Any, scores_at: Any, steps: Any, highest: Any, factor: Any) -> Any:
    """Replace bfloat16 scores by weights 2**(factor (s - highest)); return their sum, before rounding.

    Four powers of the series suffice for bfloat16. The weight of `NO_SCORE` is zero.
    """
    writer = InstructionWriter(builder)
    top, factors = writer.broadcast(highest), writer.broadcast(factor)
    loop = Loop(builder, [ZEROS] * 2)
    at, halves = writer.advance(scores_at, loop.index, LINE), ir.VectorType(ir.IntType(16), LANES)
    weights = []
    for place in (0, LINE // 2):
        words = builder.zext(writer.load(writer.offset(at, place), halves), WORDS)
        score = builder.bitcast(builder.shl(words, splat(WORDS, 16)), FLOATS)
        power = builder.fmul(builder.fsub(score, top), factors)
        weights.append(writer.exp2(power, terms=4))
    sums = [builder.fadd(*pair) for pair in zip(loop.carried, weights, strict=True)]
    writer.store(writer.narrow_both(*weights), at)
    loop.end(sums, steps)
    nothing, name = ir.Constant(ir.FloatType(), 0.0), f"llvm.vector.reduce.fadd.v{LANES}f32"
    return call_llvm(builder, name, ir.FloatType(), nothing, builder.fadd(*sums))


@compiled()
def _softmax_pairs(
    scores: Any, first: int, stop: int, padded_visible: int, factor: Any, sink: Any
) -> Any:
    """Do as `_softmax` in vectors of 512 bits; LLVM's own have 256, and compute powers of two in integers."""
    masked = narrow(NO_SCORE)
    before, behind = scores[:first], scores[stop:padded_visible]
    for index in range(len(before)):
        before[index] = masked
    for index in range(len(behind)):
        behind[index] = masked
    at, steps = scores.ctypes.data, padded_visible // (2 * LANES)
    highest = maximum(_highest(at, steps), sink)
    return _weigh(at, steps, highest, factor) + exp2((sink - highest) * factor)


def softmax(scores: Any, first: int, stop: int, padded_visible: int, factor: Any, sink: Any) -> Any:
    """Do as `_softmax`, in the form of the operands."""
    raise NotImplementedError


@numba.extending.overload(softmax)
def _choose_softmax(
    scores: Any, first: Any, stop: Any, padded_visible: Any, factor: Any, sink: Any
) -> Any:
    chosen = _softmax_pairs if scores.dtype == numba.uint16 else _softmax

    def weigh(
        scores: Any, first: Any, stop: Any, padded_visible: Any, factor: Any, sink: Any
    ) -> Any:
        return chosen(scores, first, stop, padded_visible, factor, sink)

    return weigh


@compiled()
def _softmax(
    scores: Any, first: int, stop: int, padded_visible: int, factor: Any, sink: Any
) -> Any:
    """Replace the visible scores of a row by weights 2**(factor (s_t - max s)), masked ones by zero.

    Scores before `first` and from `stop` on are masked. Returns the divisor of the weights, to which the sink adds.
    """
    before, behind = scores[:first], scores[stop:padded_visible]
    for index in range(len(before)):
        before[index] = 0
    for index in range(len(behind)):
        behind[index] = 0
    scores = scores[first:stop]
    highest = sink
    for index in range(len(scores)):
        highest = maximum(highest, widen(scores[index]))
    total = exp2((sink - highest) * factor)
    for index in range(len(scores)):
        weight = exp2((widen(scores[index]) - highest) * factor)
        scores[index] = as_type_of(scores[0], weight)
        total += weight
    return total


@compiled()
def _score(queries: Any, keys_at: int, keys: int, scores: Any) -> None:
    """Write Q K^T for whole passes of queries and whole panels of keys."""
    padded_rows, head_dim = queries.shape
    kind, key_bytes = queries[0, 0], 2 * head_dim
    for key in range(0, keys, PANEL):
        for row in range(0, padded_rows, PASS_ROWS):
            _multiply(
                kind,
                kind,
                PANEL // LANES,
                queries[row].ctypes.data,
                queries.strides[0],
                keys_at + key * key_bytes,
                head_dim // 2,
                scores[row].ctypes.data + key * scores.itemsize,
                scores.strides[0],
            )


@compiled()
def _combine(
    weights: Any, first: int, keys: int, values_at: int, padded_keys: int, summed: Any
) -> None:
    """Write P V for whole passes of weights and the values of `keys` keys from `first` on."""
    padded_rows, head_dim = summed.shape
    column = 0
    while column < head_dim:
        vectors = vectors_of(head_dim - column)
        for row in range(0, padded_rows, PASS_ROWS):
            _multiply(
                weights[0, 0],
                summed[0, 0],
                vectors,
                weights[row].ctypes.data,
                weights.strides[0],
                values_at + padded_keys * column * 2 + first // 2 * vectors * LINE,
                keys // 2,
                summed[row].ctypes.data + column * summed.itemsize,
                summed.strides[0],
            )
        column += vectors * LANES


@compiled()
def _read_row(row_at: int, inputs: Any) -> None:
    """Convert a bfloat16 row to the type of the operands."""
    source = bf16_array(row_at, len(inputs))
    for index in range(len(inputs)):
        inputs[index] = as_type_of(inputs[0], widen(source[index]))


@compiled()
def _read_rows(rows_at: int, rows: int, head_dim: int, tag: Any) -> Any:
    """Convert bfloat16 rows to the type of the tag, padded with zeros to whole passes: [padded rows, head_dim]."""
    padded_rows = (rows + PASS_ROWS - 1) // PASS_ROWS * PASS_ROWS
    copied = np.zeros((padded_rows, head_dim), dtype=tag.dtype)
    for row in range(rows):
        _read_row(rows_at + row * 2 * head_dim, copied[row])
    return copied


class QueryBlock(NamedTuple):
    """Rows of a task, and their visible keys: those up to the row itself, within its window.

      keys   0  1  2  3 | 4  5  6  7 | 8  9 10 11        4 keys per panel, window = 6;  x visible, . masked
      row 0     skipped | x  x  x  x | x  x  .  .        visible = 6
      row 1             | .  x  x  x | x  x  x  .        padded_visible = 8
      row 2             | .  .  x  x | x  x  x  x

    Attributes:
        head: Query head.
        start: First row, counted over all sequences.
        rows: Number of rows.
        visible: Keys up to the last one of the first row, without skipped ones.
        skipped: Keys in panels before the windows of all rows.
        padded_visible: Keys up to the last one of any row, without skipped ones, padded to whole panels.
        packed: Index of the packed keys: of the KV head and sequence.
    """

    head: int
    start: int
    rows: int
    visible: int
    skipped: int
    padded_visible: int
    packed: int


@compiled()
def block_of(arguments: PrefillArguments, task: int, block: int, panel: int) -> QueryBlock:
    """Rows and visible keys of a task of up to `block` rows."""
    blocks = (arguments.rows + block - 1) // block
    query, first = task // blocks, task % blocks * block
    head, sequence = query // arguments.sequences, query % arguments.sequences
    start, rows = sequence * arguments.rows + first, min(block, arguments.rows - first)
    visible = len(arguments.slots) - (arguments.rows - 1 - first) * arguments.causal
    # No row of the block sees keys before the first row's window.
    skipped = (max(visible - arguments.window, 0) // panel * panel) if arguments.window else 0
    visible -= skipped
    padded_visible = (visible + (rows - 1) * arguments.causal + panel - 1) // panel * panel
    packed = head // (arguments.heads // arguments.kv_heads) * arguments.sequences + sequence
    return QueryBlock(head, start, rows, visible, skipped, padded_visible, packed)


@compiled()
def write_attended(out_at: int, summed: Any, total: Any) -> None:
    """Divide the weighted sum of values by the sum of weights, round and store it."""
    out, share = bf16_array(out_at, len(summed)), np.float32(1.0) / total
    for index in range(len(summed)):
        out[index] = narrow(summed[index] * share)


@compiled()
def _attend_block(task: int, arguments: PrefillArguments) -> None:
    """Attend for one block of query rows, of one head and sequence."""
    head_dim, row_bytes = arguments.head_dim, 2 * arguments.head_dim
    head, start, rows, visible, skipped, padded_visible, packed = block_of(
        arguments, task, BLOCK, PANEL
    )
    keys_at = arguments.packed_at + packed * 2 * arguments.padded_keys * row_bytes
    query_at = arguments.query_at + head * arguments.query_head_bytes + start * row_bytes
    queries = _read_rows(query_at, rows, head_dim, arguments.tag)
    # Rows are padded by one vector: with a power of two between them, the rows of a pass would
    # share few cache sets.
    scores = np.empty((len(queries), padded_visible + LANES), dtype=arguments.tag.dtype)
    _score(queries, keys_at + skipped * row_bytes, padded_visible, scores)
    factor = arguments.factor
    if arguments.softcap > np.float32(0.0):
        factor = np.float32(1.0)
        for row in range(rows):
            soft_cap(scores[row], padded_visible, arguments.factor, arguments.softcap)
    sink = sink_of(arguments.sinks_at, head, factor)
    totals = np.empty(rows, dtype=np.float32)
    for row in range(rows):
        stop = visible + row * arguments.causal
        first = max(stop - arguments.window, 0) if arguments.window else 0
        totals[row] = softmax(scores[row], first, stop, padded_visible, factor, sink)
    summed = np.empty((len(queries), head_dim), dtype=np.float32)
    values_at = keys_at + arguments.padded_keys * row_bytes
    _combine(scores, skipped, padded_visible, values_at, arguments.padded_keys, summed)
    for row in range(rows):
        out_at = arguments.out_at + ((start + row) * arguments.heads + head) * row_bytes
        write_attended(out_at, summed[row], totals[row])


@kernel(numba.int64, None)
def attend(pool: int, arguments: PrefillArguments) -> None:
    """Attend for all rows and heads, on the threads of a pool."""
    pieces = arguments.kv_heads * arguments.sequences * (arguments.padded_keys // PANEL)
    spread(pool, pieces, 4, _pack_panel, (arguments,))
    blocks = arguments.heads * arguments.sequences * ((arguments.rows + BLOCK - 1) // BLOCK)
    spread(pool, blocks, 1, _attend_block, (arguments,))


def any_arguments(tag: npt.NDArray[Any]) -> PrefillArguments:
    """Return arguments of the types for a dtype tag, for compilation."""
    zero = np.float32(0.0)
    values = [*[0] * 11, np.empty(0, dtype=np.int64), *[0] * 4, zero, zero, 0, 0, tag]
    return PrefillArguments._make(values)
