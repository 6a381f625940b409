"""Tokens of a row that top-k and top-p keep: those above a limit, the minimum kept logit, and some equal to it.

Nothing is sorted. The limit is bracketed by the probability masses above four thresholds at a time, which cut the
interval to a fifth. Few tokens are kept in most rows of a trained model: the k-th highest among the maximum logits of
all blocks is at most the k-th highest logit, so the tokens from there on are listed, from the few blocks that have any.
If many tokens are kept, the limit is bracketed over all blocks, the mass above the bracket is added up exactly, and the
tokens within are listed.

In the list the limit is bracketed again, until about ten tokens are left; these are processed value by value.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call,assignment"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import larger, power_of_two
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits

BLOCK = 256
"""Weights that are summed in float32, before their sums are added in float64."""
HEAD = 128
"""Minimum length of the list in which top-p is tried first."""
_BLOCK_BITS = 8
_FEW = np.float32(12.0)
"""Maximum mass of a bracket, in tokens of its lower end."""
_OCTAVES_MAX = np.float32(126.0)
"""A token this far below the maximum has no weight."""
_OCTAVES_MIN = np.float32(1e-6)
"""Logits this close to each other are not separated by thresholds, but one by one."""
_LANES = 64
_SERIES = tuple(np.float32(math.log(2.0) ** power / math.factorial(power)) for power in range(7))

# Infinite logits are forbidden tokens and NaN is an error, so the compiler must not assume their
# absence.
EXACT = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}}
INNER = EXACT | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options for functions that only compiled code calls: a Python wrapper takes as long to compile as the function."""


class Buffers(NamedTuple):
    """Buffers for a row, reused in every step; `counts` and `outputs` are zero between rows.

    `values` and `weights` are padded to whole blocks, with logits of -inf. `tops` and `sums` are the maximum logit
    and the sum of weights of each block. `ids`, `list_values` and `list_weights` are a list of tokens in order of
    ids.

    Shape: `values`, `weights`, `list_values`, `list_weights`, `near` float32 [tokens]; `tops`, `zeros` float32,
    `sums` float64 [blocks]; `ids`, `counts`, `outputs` int32 [tokens].
    """

    values: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    tops: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.float32]
    sums: npt.NDArray[np.float64]
    ids: npt.NDArray[np.int32]
    list_values: npt.NDArray[np.float32]
    list_weights: npt.NDArray[np.float32]
    near: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    outputs: npt.NDArray[np.int32]


def make_buffers(vocabulary: int) -> Buffers:
    """Allocate buffers for a vocabulary size."""
    blocks = -(-vocabulary // BLOCK)
    tokens = blocks * BLOCK
    return Buffers(
        np.full(tokens, -np.inf, np.float32),
        np.zeros(tokens, np.float32),
        np.empty(blocks, np.float32),
        np.zeros(blocks, np.float32),
        np.empty(blocks, np.float64),
        np.empty(tokens + 1, np.int32),
        np.empty(tokens + 1, np.float32),
        np.empty(tokens + 1, np.float32),
        np.empty(tokens + 1, np.float32),
        np.zeros(tokens, np.int32),
        np.zeros(tokens, np.int32),
    )


@emits(numba.uint64, numba.intp, numba.float32, numba.float32)
def _flags(builder: Any, at: Any, low: Any, high: Any) -> Any:
    """Bit mask of the 64 float32 at an address that are in [low, high)."""
    kind = ir.VectorType(ir.FloatType(), _LANES)
    values = builder.load(builder.inttoptr(at, kind.as_pointer()), align=4)
    nothing, first = ir.Constant(kind, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    places = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), None)

    def everywhere(value: Any) -> Any:
        return builder.shuffle_vector(
            builder.insert_element(nothing, value, first), nothing, places
        )

    inside = builder.and_(
        builder.fcmp_ordered(">=", values, everywhere(low)),
        builder.fcmp_ordered("<", values, everywhere(high)),
    )
    return builder.bitcast(inside, ir.IntType(64))


@emits(numba.int64, numba.uint64)
def _lowest_bit(builder: Any, flags: Any) -> Any:
    """Index of the lowest set bit."""
    return builder.cttz(flags, ir.Constant(ir.IntType(1), 1))


@compiled(**INNER)
def power(octaves: Any) -> Any:
    """2**-octaves in float32, for octaves >= 0, to about the last bit; 0 far below.

    Like `exp2`, but with the powers of ln 2 in the coefficients, and without overflow.
    """
    whole = np.floor(np.float32(0.5) - octaves)
    rest = -octaves - whole
    series = _SERIES[6] * rest + _SERIES[5]
    series = series * rest + _SERIES[4]
    series = series * rest + _SERIES[3]
    series = series * rest + _SERIES[2]
    series = series * rest + _SERIES[1]
    series = series * rest + np.float32(1.0)
    return series * power_of_two(whole) if octaves < _OCTAVES_MAX else np.float32(0.0)


@compiled(**INNER)
def weigh(top: Any, scale: Any, weight_min: Any, buffers: Buffers) -> Any:
    """Compute all weights and the sums of blocks; return their total. Weights below `weight_min` become 0."""
    total = 0.0
    for block in range(len(buffers.sums)):
        part = buffers.values[block * BLOCK : (block + 1) * BLOCK]
        weights = buffers.weights[block * BLOCK : (block + 1) * BLOCK]
        added = np.float32(0.0)
        for index in range(BLOCK):
            weight = power((top - part[index]) * scale)
            weight = weight if weight >= weight_min else np.float32(0.0)
            weights[index] = weight
            added += weight
        buffers.sums[block] = added
        total += added
    return total


@compiled(**INNER)
def weigh_list(count: int, top: Any, scale: Any, floor: Any, buffers: Buffers) -> Any:
    """Compute the weights of a list, at least `floor`; return their total."""
    total = 0.0
    for start in range(0, count, BLOCK):
        part = buffers.list_values[start : min(start + BLOCK, count)]
        weights = buffers.list_weights[start : start + len(part)]
        added = np.float32(0.0)
        for index in range(len(part)):
            weight = larger(power((top - part[index]) * scale), floor)
            weights[index] = weight
            added += weight
        total += added
    return total


@compiled(**INNER)
def _masses(values: Any, weights: Any, thresholds: Any, floor: Any) -> Any:
    """Masses of the logits that are at least each of four thresholds.

    A token counts with its weight, or with a `floor` of 1 as one.
    """
    t1, t2, t3, t4 = thresholds
    m1, m2, m3, m4 = 0.0, 0.0, 0.0, 0.0
    for start in range(0, len(values), BLOCK):
        part = values[start : start + BLOCK]
        heavy = weights[start : start + BLOCK]
        a1, a2, a3, a4 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for index in range(len(part)):
            value, weight = part[index], larger(heavy[index], floor)
            a1 += weight if value >= t1 else np.float32(0.0)
            a2 += weight if value >= t2 else np.float32(0.0)
            a3 += weight if value >= t3 else np.float32(0.0)
            a4 += weight if value >= t4 else np.float32(0.0)
        m1, m2, m3, m4 = m1 + a1, m2 + a2, m3 + a3, m4 + a4
    return m1, m2, m3, m4


@compiled(**INNER)
def _narrow(values: Any, weights: Any, wanted: Any, bracket: Any, row: Any, floor: Any) -> Any:
    """Narrow a bracket (low, high, mass from low on, mass from high on) until few tokens are in it."""
    low, high, after, before = bracket
    top, scale = row
    while True:
        weight = larger(power((top - low) * scale), floor)
        if after - before <= _FEW * weight:
            break
        width = min(high, top) - low
        if width * scale < _OCTAVES_MIN:
            break
        step = width * np.float32(0.2)
        t1, t2 = low + step, low + np.float32(2.0) * step
        t3, t4 = low + np.float32(3.0) * step, low + np.float32(4.0) * step
        m1, m2, m3, m4 = _masses(values, weights, (t1, t2, t3, t4), floor)
        old_low, old_high = low, high
        if m4 >= wanted:
            low, after = t4, m4
        elif m3 >= wanted:
            low, high, after, before = t3, t4, m3, m4
        elif m2 >= wanted:
            low, high, after, before = t2, t3, m2, m3
        elif m1 >= wanted:
            low, high, after, before = t1, t2, m1, m2
        else:
            high, before = t1, m1
        if low == old_low and high == old_high:
            break  # floats have no value between
    return low, high, after, before


@compiled(**INNER)
def _collect(source: Any, low: Any, high: Any, top_min: Any, buffers: Buffers) -> int:
    """List the tokens whose logit or weight, in `source`, is in [low, high); return their number.

    Blocks without a logit of at least `top_min` are skipped.
    """
    count, at = 0, source.ctypes.data
    for block in range(len(buffers.tops)):
        if buffers.tops[block] < top_min:
            continue
        for start in range(block * BLOCK, (block + 1) * BLOCK, _LANES):
            flags = _flags(at + 4 * start, low, high)
            while flags != np.uint64(0):
                token = start + _lowest_bit(flags)
                buffers.ids[count] = token
                buffers.list_values[count] = buffers.values[token]
                count += 1
                flags &= flags - np.uint64(1)
    return count


@compiled(**INNER)
def list_head(wanted: int, top: Any, scale: Any, buffers: Buffers) -> Any:
    """List at least the `wanted` highest logits; return their number and the minimum of their logits.

    There may be fewer if no other token has any weight.
    """
    low = top - _OCTAVES_MAX / scale
    bracket = low, np.float32(np.inf), np.inf, 0.0
    one = np.float32(1.0)
    wanted_mass = np.float64(wanted)
    low, _, _, _ = _narrow(buffers.tops, buffers.zeros, wanted_mass, bracket, (top, scale), one)
    return _collect(buffers.values, low, np.float32(np.inf), low, buffers), low


@compiled(**INNER)
def _limit(count: int, wanted: Any, bracket: Any, row: Any, floor: Any, buffers: Buffers) -> Any:
    """Return (value, ties): the minimum kept logit of a list, and the number of kept tokens equal to it.

    The value is -inf if the whole list has less than the wanted mass.
    """
    values, weights = buffers.list_values[:count], buffers.list_weights[:count]
    low, high, _, before = _narrow(values, weights, wanted, bracket, row, floor)
    top, scale = row
    near, found = buffers.near, 0
    for index in range(count):
        near[found] = values[index]
        found += 1 if values[index] >= low and values[index] < high else 0
    value = high
    while True:
        highest, same = np.float32(-np.inf), np.float32(0.0)
        for index in range(found):
            highest = larger(highest, near[index] if near[index] < value else np.float32(-np.inf))
        if highest == np.float32(-np.inf):
            return highest, 0
        value = highest
        for index in range(found):
            same += np.float32(1.0) if near[index] == value else np.float32(0.0)
        weight = np.float64(larger(power((top - value) * scale), floor))
        if before + weight * same >= wanted:
            return value, max(math.ceil((wanted - before) / weight), 1)
        before += weight * same


@compiled(**INNER)
def limit_list(
    count: int, wanted: Any, low: Any, top: Any, scale: Any, floor: Any, buffers: Buffers
) -> int:
    """Shorten a list, with logits from `low` on, to the kept tokens; return their number.

    `wanted` is the mass to keep, of weights that are at least `floor`.
    """
    bracket = low, np.float32(np.inf), np.inf, 0.0
    value, ties = _limit(count, wanted, bracket, (top, scale), floor, buffers)
    found = 0
    for index in range(count):
        one, weight = buffers.list_values[index], buffers.list_weights[index]
        buffers.ids[found] = buffers.ids[index]
        buffers.list_values[found], buffers.list_weights[found] = one, weight
        kept = one > value or (one == value and ties > 0)
        ties -= 1 if one == value else 0
        found += 1 if kept else 0
    return found


@compiled(**INNER)
def _split(low: Any, high: Any, row: Any, floor: Any, buffers: Buffers) -> Any:
    """Sum up the mass from `high` on, by blocks, and list the tokens in [low, high).

    Reads the weights only: rounding may move a token over an end of the bracket, but always into one of the two sets.

    Returns:
        Mass from `high` on, mass of the list, length of the list.
    """
    (top, scale), before = row, 0.0
    light, heavy = power((top - low) * scale), np.float32(np.inf)
    if high < np.float32(np.inf):
        heavy = power((top - high) * scale)
    for block in range(len(buffers.sums)):
        added = np.float32(0.0)
        if buffers.tops[block] >= low:
            weights = buffers.weights[block * BLOCK : (block + 1) * BLOCK]
            for index in range(BLOCK):
                weight = larger(weights[index], floor)
                added += weight if weights[index] >= heavy else np.float32(0.0)
        buffers.sums[block] = added
        before += added
    count = _collect(buffers.weights, light, heavy, low, buffers)
    return before, weigh_list(count, top, scale, floor, buffers), count


@compiled(**INNER)
def limit_row(wanted: Any, total: Any, top: Any, scale: Any, floor: Any, buffers: Buffers) -> Any:
    """Return (value, token): tokens above the value are kept, and those equal to it with an id up to the token.

    `wanted` is the mass to keep, of weights that are at least `floor` and add up to `total` without it. Afterwards
    `sums` are the sums of kept tokens.
    """
    octaves, row = _OCTAVES_MAX, (top, scale)
    if floor == np.float32(0.0):
        # Tokens lighter than this have, all together, half the mass that need not be kept.
        lightest = (total - wanted) / (2.0 * len(buffers.values))
        octaves = min(octaves, np.float32(-np.log2(max(lightest, 1e-37))))
    start = top - octaves / scale
    bracket = start, np.float32(np.inf), np.inf, 0.0
    low, high, _, _ = _narrow(buffers.values, buffers.weights, wanted, bracket, row, floor)
    # A margin that weights can resolve at the ends of the bracket.
    margin = larger(np.float32(1e-5) / scale, np.float32(1e-6) * abs(low))
    low, high = low - margin, high + margin
    before, _, count = _split(low, high, row, floor, buffers)
    low = larger(low, start)
    if high < np.float32(np.inf):
        high += np.float32(0.1) * (
            high - low
        )  # rounding of weights may have listed tokens a little above
    bracket = low, high, np.inf, 0.0
    value, ties = _limit(count, wanted - before, bracket, row, floor, buffers)
    if value == np.float32(-np.inf):
        weigh(top, scale, np.float32(0.0), buffers)
        return value, len(buffers.values)
    last = 0
    for index in range(count):
        one = buffers.list_values[index]
        if one > value or (one == value and ties > 0):
            buffers.sums[buffers.ids[index] >> _BLOCK_BITS] += buffers.list_weights[index]
            last = buffers.ids[index] if one == value else last
        ties -= 1 if one == value else 0
    return value, last
