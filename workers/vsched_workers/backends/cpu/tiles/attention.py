"""AMX attention for many bfloat16 rows: prefill chunks over the paged cache, and image patches.

Same computation and arguments as `kernels/prefill_attention.py`. Scores are float32, softmax weights are rounded to
bfloat16.

**Packing.** Keys and values are packed once, straight from the paged cache, into half-panels (see `kernel.py`), for
each KV head and sequence:

  keys    [keys / 32, head_dim / 2, 32, 2]      B of Q K^T: N = keys, K = head_dim
  values  [head_dim / 32, keys / 2, 32, 2]      B of P V:   N = head_dim, K = keys

Head dimension and number of keys are padded with zeros to whole tiles. Then each block of 32 query rows is multiplied
by all visible keys. Its scores stay in the cache, the softmax writes the weights of a row as A tiles, and these are
multiplied by the values. Nothing is compiled for a specific shape. The result of a row depends neither on the
chunking of its prompt nor on other rows in the batch, except with a sliding window: tiles are counted from the first
key that the chunk sees.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import (
    NO_SCORE,
    bf16_array,
    exp2,
    float32_array,
    maximum,
    sink_of,
    soft_cap,
)
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits, kernel
from vsched_workers.backends.cpu.kernels.prefill_attention import (
    PrefillArguments,
    block_of,
    copy_pair,
    interleave,
    two_keys,
    write_attended,
)
from vsched_workers.backends.cpu.kernels.simd import (
    FLOATS,
    LANES,
    LINE,
    ZEROS,
    InstructionWriter,
    Loop,
    call_llvm,
    constant,
)
from vsched_workers.backends.cpu.kernels.thread_pool import spread
from vsched_workers.backends.cpu.tiles.kernel import (
    HALF,
    PAIR_BYTES,
    STEP_INPUTS,
    TILE_BYTES,
    TILE_ROWS,
    TOGETHER,
    configure_tiles,
    multiply_tiles,
    next_line,
    pack_row,
    release_tiles,
)

BLOCK = TOGETHER * TILE_ROWS
"""Query rows of a block."""


@compiled()
def padded_head(head_dim: int) -> int:
    """Head dimension, padded to whole tiles."""
    padded: int = (head_dim + STEP_INPUTS - 1) // STEP_INPUTS * STEP_INPUTS
    return padded


# --- packing ---


@compiled()
def _pack_key(key_at: int, head_dim: int, to_at: int) -> None:
    """Write a key as one column of a half-panel, padded with zeros: 4 bytes on each line of PAIR_BYTES."""
    for pair in range(head_dim // 2):
        copy_pair(key_at + 4 * pair, to_at + pair * PAIR_BYTES)
    for pair in range(head_dim // 2, padded_head(head_dim) // 2):
        bf16_array(to_at + pair * PAIR_BYTES, 2)[:] = np.uint16(0)


@compiled()
def _pack_values(
    first_at: int, second_at: int, head_dim: int, pair: int, padded_keys: int, to_at: int
) -> None:
    """Write the values of two keys as one line of every half-panel, padded with zeros.

    Half-panel h holds d = 32 h .. 32 h + 31; its line of keys t and t + 1 is v_t[d] v_t+1[d] for each d.
    """
    for column in range(0, padded_head(head_dim), LANES):
        half, within = column // HALF, column % HALF
        at = to_at + half * padded_keys // 2 * PAIR_BYTES + pair * PAIR_BYTES + 4 * within
        if column < head_dim:
            interleave(first_at + 2 * column, second_at + 2 * column, at)
        else:
            bf16_array(at, 2 * LANES)[:] = np.uint16(0)


@compiled()
def _pack_half(task: int, arguments: PrefillArguments) -> None:
    """Pack 32 keys and their values, with zeros for padded keys."""
    halves, head_dim = arguments.padded_keys // HALF, arguments.head_dim
    packed, half = task // halves, task % halves
    head, sequence = packed // arguments.sequences, packed % arguments.sequences
    start = head * arguments.head_bytes + sequence * len(arguments.slots) * arguments.slot_bytes
    of_all = 2 * arguments.padded_keys * padded_head(head_dim)
    keys_at = arguments.packed_at + packed * 2 * of_all
    half_at = keys_at + half * (of_all // halves)
    padding = np.zeros(head_dim, dtype=np.uint16)
    for pair in range(half * HALF // 2, (half + 1) * HALF // 2):
        first_key, second_key, first_value, second_value = two_keys(
            arguments, start, 2 * pair, padding.ctypes.data
        )
        column_at = half_at + 2 * pair % HALF * 4
        _pack_key(first_key, head_dim, column_at)
        _pack_key(second_key, head_dim, column_at + 4)
        _pack_values(
            first_value, second_value, head_dim, pair, arguments.padded_keys, keys_at + of_all
        )


# --- attending ---


@emits(numba.float32, numba.intp, numba.intp)
def _highest(builder: Any, scores_at: Any, steps: Any) -> Any:
    """Maximum of `steps` K steps of scores."""
    writer = InstructionWriter(builder)
    loop = Loop(builder, [constant(float(NO_SCORE))] * 2)
    at = writer.advance(scores_at, loop.index, 2 * LINE)
    loaded = [writer.load(writer.offset(at, each), FLOATS, LINE) for each in (0, LINE)]
    pairs = zip(loaded, loop.carried, strict=True)
    loop.end(found := [writer.maximum(*pair) for pair in pairs], steps)
    return call_llvm(
        builder, f"llvm.vector.reduce.fmax.v{LANES}f32", ir.FloatType(), writer.maximum(*found)
    )


@emits(numba.float32, numba.intp, numba.intp, numba.float32, numba.float32, numba.intp)
def _weigh(
    builder: Any, scores_at: Any, steps: Any, highest: Any, factor: Any, weights_at: Any
) -> Any:
    """Write the weights 2**(factor (s - highest)) of scores into A tiles, 0 for `NO_SCORE`; return their sum."""
    writer = InstructionWriter(builder)
    top, factors = writer.broadcast(highest), writer.broadcast(factor)
    loop = Loop(builder, [ZEROS] * 2)
    at = writer.advance(scores_at, loop.index, 2 * LINE)
    weights, sums = [], []
    for place, total in zip((0, LINE), loop.carried, strict=True):
        score = writer.load(writer.offset(at, place), FLOATS, LINE)
        power = builder.fmul(builder.fsub(score, top), factors)
        # 2**-126 is not zero, and masked keys must not count at all.
        weight = writer.exp2(writer.maximum(power, constant(-126.0)), terms=6)
        is_visible = builder.fcmp_ordered(">", score, constant(float(NO_SCORE)))
        weights.append(builder.select(is_visible, weight, ZEROS))
        sums.append(builder.fadd(total, weights[-1]))
    both = writer.narrow_both(*weights)
    writer.store(both, writer.advance(weights_at, loop.index, TILE_BYTES), LINE)
    loop.end(sums, steps)
    total = builder.fadd(*sums)
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    return call_llvm(builder, name, ir.FloatType(), ir.Constant(ir.FloatType(), 0.0), total)


@compiled()
def _softmax(
    scores: Any,
    first: int,
    stop: int,
    factor: Any,
    sink: Any,
    row: int,
    steps: int,
    weights_at: int,
) -> Any:
    """Write the weights 2**(factor (s_t - max s)) of a row's scores into A tiles, and zeros for masked keys.

    Keys before `first` and from `stop` on are masked. Returns the divisor of the weights, to which the sink adds.
    """
    before, behind = scores[:first], scores[stop : steps * STEP_INPUTS]
    for index in range(len(before)):
        before[index] = NO_SCORE
    for index in range(len(behind)):
        behind[index] = NO_SCORE
    scores_at = scores.ctypes.data
    at = weights_at + row // TILE_ROWS * steps * TILE_BYTES + row % TILE_ROWS * LINE
    highest = maximum(_highest(scores_at, steps), sink)
    return _weigh(scores_at, steps, highest, factor, at) + exp2((sink - highest) * factor)


@compiled()
def _attend_block(task: int, arguments: PrefillArguments) -> None:
    """Attend for one block of query rows, of one head and sequence."""
    head_dim, row_bytes = arguments.head_dim, 2 * arguments.head_dim
    head, start, rows, visible, skipped, padded_visible, packed = block_of(
        arguments, task, BLOCK, HALF
    )
    steps = padded_visible // HALF
    inputs, tiles = padded_head(head_dim), (rows + TILE_ROWS - 1) // TILE_ROWS
    of_all = 2 * arguments.padded_keys * inputs
    keys_at = arguments.packed_at + packed * 2 * of_all
    values_at = keys_at + of_all
    query_bytes = inputs // STEP_INPUTS * TILE_BYTES
    # Rows are padded by one vector: with a power of two between them, the lines of a tile would
    # share few cache sets.
    score_values, sum_values = padded_visible + LANES, inputs + LANES
    room = np.empty(
        LINE
        + TOGETHER * (query_bytes + steps * TILE_BYTES)
        + BLOCK * 4 * (score_values + sum_values),
        dtype=np.uint8,
    )
    query_at = next_line(room)
    weights_at = query_at + TOGETHER * query_bytes
    scores_at = weights_at + TOGETHER * steps * TILE_BYTES
    sums_at = scores_at + BLOCK * 4 * score_values
    rows_at = arguments.query_at + head * arguments.query_head_bytes + start * row_bytes
    for row in range(rows):
        pack_row(row, rows_at, head_dim, query_at)
    configure_tiles(rows)
    for half in range(steps):
        multiply_tiles(
            tiles, inputs // STEP_INPUTS, query_at, query_bytes,
            keys_at + (skipped // HALF + half) * inputs // 2 * PAIR_BYTES, 0,
            scores_at + half * HALF * 4, 4 * score_values, 0, 0, 0,
        )  # fmt: skip
    totals = np.empty(rows, dtype=np.float32)
    for row in range(rows):
        scores = float32_array(scores_at + row * 4 * score_values, padded_visible)
        factor = arguments.factor
        if arguments.softcap > np.float32(0.0):
            factor = np.float32(1.0)
            soft_cap(scores, padded_visible, arguments.factor, arguments.softcap)
        sink = sink_of(arguments.sinks_at, head, factor)
        stop = visible + row * arguments.causal
        first = max(stop - arguments.window, 0) if arguments.window else 0
        totals[row] = _softmax(scores, first, stop, factor, sink, row, steps, weights_at)
    for half in range(inputs // HALF):
        multiply_tiles(
            tiles, steps, weights_at, steps * TILE_BYTES,
            values_at + (half * arguments.padded_keys + skipped) // 2 * PAIR_BYTES, 0,
            sums_at + half * HALF * 4, 4 * sum_values, 0, 0, 0,
        )  # fmt: skip
    release_tiles()
    for row in range(rows):
        summed = float32_array(sums_at + row * 4 * sum_values, head_dim)
        out_at = arguments.out_at + ((start + row) * arguments.heads + head) * row_bytes
        write_attended(out_at, summed, totals[row])
    room[0] = np.uint8(0)  # keeps the buffer alive: only its address is used above


@kernel(numba.int64, None)
def attend_in_tiles(pool: int, arguments: PrefillArguments) -> None:
    """Attend for all rows and heads, on the threads of a pool."""
    pieces = arguments.kv_heads * arguments.sequences * (arguments.padded_keys // HALF)
    spread(pool, pieces, 4, _pack_half, (arguments,))
    blocks = arguments.heads * arguments.sequences * ((arguments.rows + BLOCK - 1) // BLOCK)
    spread(pool, blocks, 1, _attend_block, (arguments,))
