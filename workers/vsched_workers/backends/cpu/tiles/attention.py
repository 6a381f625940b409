"""Attention of many rows of bfloat16 in tiles (AMX): chunks of prompts over the paged cache, and patches of images.

It computes what `kernels/prefill_attention.py` does, and is told of it in the same way. Scores are float32, and weights
are rounded to bfloat16.

**Layout.** Keys and values are packed once, straight from the paged cache, into halves of panels (see `kernel.py`): for
each key head and sequence

    keys    [keys / 32, head dim / 2, 32, 2]
    values  [head dim / 32, keys / 2, 32, 2]

with heads and keys padded with zeros to whole tiles. Then 32 rows at a time are multiplied with all keys that they see.
Their scores stay in the cache, the softmax of a row writes its weights into tiles, and these are multiplied with the
values. Nothing is compiled for a shape. What a row gets depends neither on how its prompt is cut nor on the rows beside
it.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, float32_array
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits
from vsched_workers.backends.cpu.kernels.prefill_attention import (
    PrefillArguments,
    bend,
    block_of,
    copy_pair,
    interleave,
    no_arguments,
    two_keys,
    write_attended,
)
from vsched_workers.backends.cpu.kernels.simd import (
    FLOATS,
    LANES,
    LINE,
    LONG,
    WORD,
    ZEROS,
    InstructionWriter,
    Loop,
    call_llvm,
)
from vsched_workers.backends.cpu.kernels.softmax import SCORE_MIN
from vsched_workers.backends.cpu.kernels.thread_pool import spread
from vsched_workers.backends.cpu.tiles.kernel import (
    HALF,
    PAIR_BYTES,
    STEP_INPUTS,
    TILE_BYTES,
    TILE_ROWS,
    TOGETHER,
    configure_tiles,
    lay_out_row,
    multiply_tiles,
    next_line,
    release_tiles,
)

BLOCK = TOGETHER * TILE_ROWS
"""Rows that are computed at once."""


@compiled()
def padded_head(head_dim: int) -> int:
    """Return the values of a head that is padded to whole tiles."""
    padded: int = (head_dim + STEP_INPUTS - 1) // STEP_INPUTS * STEP_INPUTS
    return padded


# --- packing ---


@compiled()
def _pack_key(key_at: int, head_dim: int, to_at: int) -> None:
    """Write a key to its column of half a panel, and zeros behind it."""
    for pair in range(head_dim // 2):
        copy_pair(key_at + 4 * pair, to_at + pair * PAIR_BYTES)
    for pair in range(head_dim // 2, padded_head(head_dim) // 2):
        bf16_array(to_at + pair * PAIR_BYTES, 2)[:] = np.uint16(0)


@compiled()
def _pack_values(
    first_at: int, second_at: int, head_dim: int, pair: int, padded_keys: int, to_at: int
) -> None:
    """Write the values of two keys to their row of every half of a panel, and zeros behind them."""
    for column in range(0, padded_head(head_dim), LANES):
        half, within = column // HALF, column % HALF
        at = to_at + half * padded_keys // 2 * PAIR_BYTES + pair * PAIR_BYTES + 4 * within
        if column < head_dim:
            interleave(first_at + 2 * column, second_at + 2 * column, at)
        else:
            bf16_array(at, 2 * LANES)[:] = np.uint16(0)


@compiled()
def _pack_half(given: PrefillArguments, task: int) -> None:
    """Pack 32 keys and their values, with zeros behind the last of all."""
    halves, head_dim = given.padded_keys // HALF, given.head_dim
    which, half = task // halves, task % halves
    head, sequence = which // given.sequences, which % given.sequences
    start = head * given.head_bytes + sequence * len(given.slots) * given.slot_bytes
    of_all = 2 * given.padded_keys * padded_head(head_dim)
    keys_at = given.packed_at + which * 2 * of_all
    half_at = keys_at + half * (of_all // halves)
    padding = np.zeros(head_dim, dtype=np.uint16)
    for pair in range(half * HALF // 2, (half + 1) * HALF // 2):
        first_key, second_key, first_value, second_value = two_keys(
            given, start, 2 * pair, padding.ctypes.data
        )
        column_at = half_at + 2 * pair % HALF * 4
        _pack_key(first_key, head_dim, column_at)
        _pack_key(second_key, head_dim, column_at + 4)
        _pack_values(first_value, second_value, head_dim, pair, given.padded_keys, keys_at + of_all)


# --- attending ---


class _SoftmaxWriter(InstructionWriter):
    """Writes the softmax of a row whose scores begin at a line, in vectors of 16.

    LLVM would do it in vectors of 8, and add up the weights of each step.
    """

    def larger(self, one: Any, other: Any) -> Any:
        """Return the larger of each two."""
        return self.builder.select(self.builder.fcmp_ordered(">", one, other), one, other)

    def exp2(self, power: Any) -> Any:
        """Return 2**x of x >= -126, as `bf16.exp2` does: 2**n * e**(f ln 2), n whole, |f| <= 1/2, by its series."""
        builder = self.builder
        whole = call_llvm(builder, f"llvm.rint.v{LANES}f32", FLOATS, power)
        rest = builder.fsub(power, whole)
        series = self.constant(math.log(2) ** 6 / math.factorial(6))
        for term in range(5, -1, -1):
            coefficient = self.constant(math.log(2) ** term / math.factorial(term))
            series = self.multiply_add(coefficient, series, rest)
        all_lanes, usual_rounding = ir.Constant(ir.IntType(LANES), -1), ir.Constant(WORD, 4)
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        return call_llvm(builder, name, FLOATS, series, whole, ZEROS, all_lanes, usual_rounding)

    def constant(self, value: float) -> Any:
        """Return a vector with a number in every lane."""
        return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


@emits(numba.float32, numba.intp, numba.intp)
def _highest(builder: Any, scores_at: Any, steps: Any) -> Any:
    """Return the highest of so many steps of scores."""
    writer = _SoftmaxWriter(builder)
    loop = Loop(builder, [writer.constant(float(SCORE_MIN))] * 2)
    at = writer.advance(scores_at, loop.index, 2 * LINE)
    loaded = [
        writer.load(builder.add(at, ir.Constant(LONG, each)), FLOATS, LINE) for each in (0, LINE)
    ]
    pairs = zip(loaded, loop.carried, strict=True)
    loop.end(found := [writer.larger(*pair) for pair in pairs], steps)
    return call_llvm(
        builder, f"llvm.vector.reduce.fmax.v{LANES}f32", ir.FloatType(), writer.larger(*found)
    )


@emits(numba.float32, numba.intp, numba.intp, numba.float32, numba.float32, numba.intp)
def _weigh(
    builder: Any, scores_at: Any, steps: Any, highest: Any, factor: Any, weights_at: Any
) -> Any:
    """Write the weights 2**(factor (s - highest)) of scores into tiles, 0 for `SCORE_MIN`; return their sum."""
    writer = _SoftmaxWriter(builder)
    top, factors = writer.broadcast(highest), writer.broadcast(factor)
    loop = Loop(builder, [ZEROS] * 2)
    at = writer.advance(scores_at, loop.index, 2 * LINE)
    weights, sums = [], []
    for place, total in zip((0, LINE), loop.carried, strict=True):
        score = writer.load(builder.add(at, ir.Constant(LONG, place)), FLOATS, LINE)
        power = builder.fmul(builder.fsub(score, top), factors)
        # The least power is no zero, and what is not seen must not count at all.
        weight = writer.exp2(writer.larger(power, writer.constant(-126.0)))
        seen = builder.fcmp_ordered(">", score, writer.constant(float(SCORE_MIN)))
        weights.append(builder.select(seen, weight, ZEROS))
        sums.append(builder.fadd(total, weights[-1]))
    both = writer.narrow_both(*weights)
    writer.store(both, writer.advance(weights_at, loop.index, TILE_BYTES), LINE)
    loop.end(sums, steps)
    total = builder.fadd(*sums)
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    return call_llvm(builder, name, ir.FloatType(), ir.Constant(ir.FloatType(), 0.0), total)


@compiled()
def _softmax(
    scores: Any, unseen: int, seen: int, factor: Any, row: int, steps: int, weights_at: int
) -> Any:
    """Write the weights 2**(factor (s_t - max s)) of a row's scores into tiles, and zeros for what it does not see.

    It does not see the first `unseen` ones, and those from `seen` on. Returns what the weights are to be divided by.
    """
    before, behind = scores[:unseen], scores[seen : steps * STEP_INPUTS]
    for index in range(len(before)):
        before[index] = SCORE_MIN
    for index in range(len(behind)):
        behind[index] = SCORE_MIN
    scores_at = scores.ctypes.data
    at = weights_at + row // TILE_ROWS * steps * TILE_BYTES + row % TILE_ROWS * LINE
    return _weigh(scores_at, steps, _highest(scores_at, steps), factor, at)


@compiled()
def _attend_block(given: PrefillArguments, task: int) -> None:
    """Attend for the rows of one block, which are of one head and sequence."""
    head_dim, size = given.head_dim, 2 * given.head_dim
    head, start, rows, seen, skipped, width, packed = block_of(given, task, BLOCK, HALF)
    steps = width // HALF
    inputs, tiles = padded_head(head_dim), (rows + TILE_ROWS - 1) // TILE_ROWS
    of_all = 2 * given.padded_keys * inputs
    keys_at = given.packed_at + packed * 2 * of_all
    values_at = keys_at + of_all
    query_bytes = inputs // STEP_INPUTS * TILE_BYTES
    # A vector apart, or the rows of a tile would lie where the cache has few places for them.
    score_values, sum_values = width + LANES, inputs + LANES
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
    given_at = given.query_at + head * given.query_head_bytes + start * size
    for row in range(rows):
        lay_out_row(given_at + row * size, row, head_dim, query_at)
    configure_tiles(rows)
    for half in range(steps):
        multiply_tiles(
            tiles, inputs // STEP_INPUTS, query_at, query_bytes,
            keys_at + (skipped // HALF + half) * inputs // 2 * PAIR_BYTES, 0,
            scores_at + half * HALF * 4, 4 * score_values, 0, 0, 0,
        )  # fmt: skip
    totals = np.empty(rows, dtype=np.float32)
    for row in range(rows):
        scores = float32_array(scores_at + row * 4 * score_values, width)
        factor = given.factor
        if given.softcap > np.float32(0.0):
            factor = np.float32(1.0)
            bend(scores, width, given.factor, given.softcap)
        stop = seen + row * given.causal
        unseen = max(stop - given.window, 0) if given.window else 0
        totals[row] = _softmax(scores, unseen, stop, factor, row, steps, weights_at)
    for half in range(inputs // HALF):
        multiply_tiles(
            tiles, steps, weights_at, steps * TILE_BYTES,
            values_at + (half * given.padded_keys + skipped) // 2 * PAIR_BYTES, 0,
            sums_at + half * HALF * 4, 4 * sum_values, 0, 0, 0,
        )  # fmt: skip
    release_tiles()
    for row in range(rows):
        summed = float32_array(sums_at + row * 4 * sum_values, head_dim)
        out_at = given.out_at + ((start + row) * given.heads + head) * size
        write_attended(out_at, summed, totals[row])
    room[0] = np.uint8(0)  # its address is used above: it must live until here


@compiled()
def _pack_halfs(first: int, stop: int, given: PrefillArguments) -> None:
    for task in range(first, stop):
        _pack_half(given, task)


@compiled()
def _attend_blocks(first: int, stop: int, given: PrefillArguments) -> None:
    for task in range(first, stop):
        _attend_block(given, task)


@compiled()
def attend_in_tiles(pool: int, given: PrefillArguments) -> None:
    """Attend as `given` says."""
    pieces = given.kv_heads * given.sequences * (given.padded_keys // HALF)
    spread(pool, pieces, 4, _pack_halfs, (given,))
    blocks = given.heads * given.sequences * ((given.rows + BLOCK - 1) // BLOCK)
    spread(pool, blocks, 1, _attend_blocks, (given,))


def warm_up() -> None:
    """Compile, so that the first request does not wait for it."""
    attend_in_tiles(0, no_arguments())
