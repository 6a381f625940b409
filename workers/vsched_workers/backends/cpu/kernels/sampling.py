"""Drawing tokens, row by row: a handful of passes over the vocabulary, none of which sorts it.

A row is widened into a buffer that stays in the second cache, and what changes single logits (penalties, biases) is
done there. The weight of a token is 2**-d, where d is how many octaves its logit lies below the highest. Where top-k or
top-p ask which logit is the least that is kept, an interval that holds it is cut to a fifth, by the masses above four
thresholds at a time, until it is a small part of an octave; what lies in it is sorted, some hundreds of logits. The
draw walks over sums of blocks and then within one block, in order of token ids.

A row is computed alone and in a fixed order of sums, so what is drawn does not depend on the rows beside it.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), for Philox.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call,assignment"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vsched_workers.backends.cpu.kernels.bf16 import (
    BF16,
    FLOAT32,
    LOG2_E,
    exp2,
    larger,
    widen,
)
from vsched_workers.backends.cpu.kernels.compilation import compiled

BLOCK = 256
"""Weights that are summed in float32, before their sums are added in float64."""
_NARROW_OCTAVES = np.float32(0.04)
"""Width of the interval that a limit is narrowed to by sums over all logits, before what lies in it is sorted."""
_STRETCH = 64
"""Logits that are passed over at once where none lies in the bucket that is looked for."""
_OCTAVES_MAX = np.float32(126.0)
"""A token so far below the highest has no weight."""

# Infinite logits are forbidden tokens and NaN is an error, so the compiler may not take them for impossible.
_EXACT = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}}


class RowParameters(NamedTuple):
    """What is asked for each row; arrays are [rows] but where told.

    Attributes:
        row: Which row of the logits.
        inverse_temperature: 0 for greedy.
        top_k: 0 for all.
        key: uint64 [rows, 2], seed and position of the draw.
        tokens: All prompts and outputs one after the other; those of a row are [starts[row], starts[row + 1]), of
            which the first `prompts[row]` are the prompt. Empty where no penalty asks for them.
        bias: What is added to single logits, `biased` the tokens; those of a row are [bias_starts[row], ...).
        mask: uint32 [masks, words]: bit i of word j allows token 32 j + i; `mask_of` is -1 for a row without one.
    """

    row: npt.NDArray[np.int64]
    inverse_temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    key: npt.NDArray[np.uint64]
    repetition: npt.NDArray[np.float32]
    presence: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]
    biased: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    bias_starts: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint32]
    mask_of: npt.NDArray[np.int64]


ROW_FIELDS = RowParameters._fields
ROW_DTYPES = (
    *(np.int64, np.float64, np.int64, np.float64, np.float64, np.uint64),
    *(np.float32, np.float32, np.float32, np.int32, np.int64, np.int64),
    *(np.int64, np.float32, np.int64, np.uint32, np.int64),
)
"""The dtypes of the arrays of `RowParameters`, in order."""


class Buffers(NamedTuple):
    """What a row is computed in, kept from step to step; `counts` and `outputs` are zero between rows.

    Shape: `values`, `weights`, `room` float32 [vocabulary]; `sums` float64 [blocks]; `counts`,
    `outputs` int32 [vocabulary].
    """

    values: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    sums: npt.NDArray[np.float64]
    room: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    outputs: npt.NDArray[np.int32]


def make_buffers(vocabulary: int) -> Buffers:
    """Return buffers for logits of this width."""
    return Buffers(
        np.empty(vocabulary, np.float32),
        np.empty(vocabulary, np.float32),
        np.empty(-(-vocabulary // BLOCK), np.float64),
        np.empty(vocabulary, np.float32),
        np.zeros(vocabulary, np.int32),
        np.zeros(vocabulary, np.int32),
    )


@compiled()
def _high_product(one: Any, other: Any) -> Any:
    """Return the upper 64 bits of a product of two uint64."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a, b, c, d = one >> half, one & low, other >> half, other & low
    middle = a * d + ((b * d) >> half)
    other_middle = b * c + (middle & low)
    return a * c + (middle >> half) + (other_middle >> half)


@compiled()
def uniform(seed: Any, position: Any) -> Any:
    """Return the first number in [0, 1) of numpy's Philox stream with this key; both uint64."""
    first, second = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
    c0, c1, c2, c3 = np.uint64(1), np.uint64(0), np.uint64(0), np.uint64(0)
    for turn in range(10):
        if turn > 0:
            seed += np.uint64(0x9E3779B97F4A7C15)
            position += np.uint64(0xBB67AE8584CAA73B)
        high, other = _high_product(first, c0), _high_product(second, c2)
        c0, c1, c2, c3 = other ^ c1 ^ seed, second * c2, high ^ c3 ^ position, first * c0
    return np.float64(c0 >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled()
def _fill(source: Any, values: Any) -> None:
    for index in range(len(values)):
        values[index] = widen(source[index])


@compiled()
def _highest(values: Any) -> Any:
    top = values[0]
    for index in range(len(values)):
        top = larger(top, values[index])
    return top


@compiled(**_EXACT)
def _not_numbers(values: Any) -> Any:
    """Return how many are NaN; the sum of flags is vectorised, a search is not."""
    found = np.float32(0.0)
    for index in range(len(values)):
        found += np.float32(1.0) if values[index] != values[index] else np.float32(0.0)
    return found


@compiled(**_EXACT)
def _penalise(ask: Any, entry: int, buffers: Buffers) -> None:
    tokens = ask.tokens[ask.starts[entry] : ask.starts[entry + 1]]
    values, counts, outputs = buffers.values, buffers.counts, buffers.outputs
    for index in range(len(tokens)):
        if tokens[index] >= len(values):
            continue  # the model's head may be narrower than its embedding
        counts[tokens[index]] = 1
        outputs[tokens[index]] += 1 if index >= ask.prompts[entry] else 0
    repetition = ask.repetition[entry]
    for index in range(len(tokens)):
        token = tokens[index]
        if token >= len(values) or counts[token] == 0:
            continue
        value, times = values[token], outputs[token]
        value = value / repetition if value > 0 else value * repetition
        if times > 0:
            value -= ask.presence[entry] + ask.frequency[entry] * np.float32(times)
        values[token] = value
        counts[token] = 0
        outputs[token] = 0


@compiled(**_EXACT)
def _adjust(ask: Any, entry: int, buffers: Buffers) -> None:
    values = buffers.values
    _penalise(ask, entry, buffers)
    for index in range(ask.bias_starts[entry], ask.bias_starts[entry + 1]):
        values[ask.biased[index]] += ask.bias[index]
    if ask.mask_of[entry] >= 0:
        words = ask.mask[ask.mask_of[entry]]
        for index in range(len(values)):
            word = words[index >> 5] if index >> 5 < len(words) else np.uint32(0)
            if not (word >> np.uint32(index & 31)) & np.uint32(1):
                values[index] = np.float32(-np.inf)


@compiled(**_EXACT)
def _power(octaves: Any) -> Any:
    """Return 2**-octaves in float32, for octaves of 0 and more, to about the last bit; 0 far below."""
    return exp2(-octaves) if octaves < _OCTAVES_MAX else np.float32(0.0)


@compiled(**_EXACT)
def _weigh(values: Any, top: Any, scale: Any, buffers: Buffers) -> Any:
    """Compute all weights and the sums of blocks; return their total."""
    total = 0.0
    for block in range(len(buffers.sums)):
        part = values[block * BLOCK : (block + 1) * BLOCK]
        weights = buffers.weights[block * BLOCK : (block + 1) * BLOCK]
        added = np.float32(0.0)
        for index in range(len(part)):
            weight = _power((top - part[index]) * scale)
            weights[index] = weight
            added += weight
        buffers.sums[block] = added
        total += added
    return total


@compiled(**_EXACT)
def _masses(low: Any, step: Any, floor: Any, buffers: Buffers) -> Any:
    """Return the masses of the logits that are at least low + step, + 2 step, + 3 step and + 4 step.

    A token counts for its weight, or with a `floor` of 1 for one.
    """
    t1, t2 = low + step, low + np.float32(2.0) * step
    t3, t4 = low + np.float32(3.0) * step, low + np.float32(4.0) * step
    m1, m2, m3, m4 = 0.0, 0.0, 0.0, 0.0
    for block in range(len(buffers.sums)):
        part = buffers.values[block * BLOCK : (block + 1) * BLOCK]
        weights = buffers.weights[block * BLOCK : (block + 1) * BLOCK]
        a1, a2, a3, a4 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for index in range(len(part)):
            value, weight = part[index], larger(weights[index], floor)
            a1 += weight if value >= t1 else np.float32(0.0)
            a2 += weight if value >= t2 else np.float32(0.0)
            a3 += weight if value >= t3 else np.float32(0.0)
            a4 += weight if value >= t4 else np.float32(0.0)
        m1, m2, m3, m4 = m1 + a1, m2 + a2, m3 + a3, m4 + a4
    return m1, m2, m3, m4


@compiled(**_EXACT)
def _any_inside(part: Any, low: Any, high: Any) -> Any:
    """Return whether any value is in [low, high)."""
    inside = np.float32(0.0)
    for index in range(len(part)):
        inside += np.float32(1.0) if part[index] >= low and part[index] < high else np.float32(0.0)
    return inside > np.float32(0.0)


@compiled(**_EXACT)
def _narrow(wanted: Any, octaves: Any, top: Any, scale: Any, floor: Any, buffers: Buffers) -> Any:
    """Return (low, high, mass from high on): the limit lies in [low, high), a small part of an octave.

    It is looked for up to `octaves` below the highest logit; if it is not there, the interval is all that is lower.
    """
    low, high, before = top - octaves / scale, np.float32(np.inf), 0.0
    start = low
    while (min(high, top) - low) * scale > _NARROW_OCTAVES:
        step = (min(high, top) - low) * np.float32(0.2)
        m1, m2, m3, m4 = _masses(low, step, floor, buffers)
        old_low, old_high = low, high
        if m4 >= wanted:
            low = low + np.float32(4.0) * step
        elif m3 >= wanted:
            low, high, before = low + np.float32(3.0) * step, low + np.float32(4.0) * step, m4
        elif m2 >= wanted:
            low, high, before = low + np.float32(2.0) * step, low + np.float32(3.0) * step, m3
        elif m1 >= wanted:
            low, high, before = low + step, low + np.float32(2.0) * step, m2
        else:
            high, before = low + step, m1
        if low == old_low and high == old_high:
            break  # floats have no value between
    if low == start:
        lowest, _, _, _ = _masses(low, np.float32(0.0), floor, buffers)
        if lowest < wanted:
            return np.float32(-np.inf), low, lowest
    return low, high, before


@compiled(**_EXACT)
def _limit(wanted: Any, total: Any, top: Any, scale: Any, buffers: Buffers, kept: Any) -> Any:
    """Return (value, ties): the least logit that is kept, and how many of those equal to it are.

    `wanted` is a count of tokens where it is negative, else a mass, of which there is `total`. Only what `kept` leaves
    is looked at, the outcome of an earlier limit.
    """
    values, (least, ties) = buffers.values, kept
    by_count, wanted = wanted < 0.0, abs(wanted)
    floor, octaves = np.float32(1.0 if by_count else 0.0), _OCTAVES_MAX
    if not by_count:
        # What is lighter than this has, all together, half the mass that need not be kept.
        lightest = (total - wanted) / (2.0 * len(values))
        octaves = min(octaves, np.float32(-np.log2(max(lightest, 1e-37))))
    low, high, before = _narrow(wanted, octaves, top, scale, floor, buffers)
    found, room = 0, buffers.room
    for start in range(0, len(values), _STRETCH):
        part = values[start : start + _STRETCH]
        if not _any_inside(part, low, high):
            continue
        for index in range(len(part)):
            if part[index] >= least and part[index] >= low and part[index] < high:
                room[found] = part[index]
                found += 1
    inside = np.sort(room[:found])[::-1]
    surplus = 0
    for index in range(found):
        surplus += 1 if inside[index] == least else 0
    inside = inside[: found - max(surplus - ties, 0)]
    value, count = least, ties
    for index in range(len(inside)):
        count = count + 1 if index > 0 and inside[index] == value else 1
        value = inside[index]
        before += 1.0 if by_count else np.float64(_power((top - value) * scale))
        if before >= wanted:
            break
    return value, count


@compiled(**_EXACT)
def _keep(least: Any, ties: int, weight_min: Any, buffers: Buffers) -> Any:
    """Take the weight of what is not kept, and compute the sums of blocks anew; return their total."""
    total, equal = 0.0, 0
    for block in range(len(buffers.sums)):
        part = buffers.values[block * BLOCK : (block + 1) * BLOCK]
        weights = buffers.weights[block * BLOCK : (block + 1) * BLOCK]
        added, same = np.float32(0.0), np.float32(0.0)
        for index in range(len(part)):
            kept = part[index] >= least and weights[index] >= weight_min
            weights[index] = weights[index] if kept else np.float32(0.0)
            added += weights[index]
            same += np.float32(1.0) if part[index] == least else np.float32(0.0)
        if equal + same > ties:
            added = np.float32(0.0)
            seen = equal
            for index in range(len(part)):
                if part[index] == least:
                    seen += 1
                    if seen > ties:
                        weights[index] = np.float32(0.0)
                added += weights[index]
        equal += np.int64(same)
        buffers.sums[block] = added
        total += added
    return total


@compiled(**_EXACT)
def _pick(target: Any, buffers: Buffers) -> Any:
    """Return the token at which the weights before it and its own exceed the target."""
    block, last = 0, len(buffers.sums) - 1
    while block < last and target >= buffers.sums[block]:
        target -= buffers.sums[block]
        block += 1
    while block > 0 and buffers.sums[block] == 0.0:  # rounding has led behind the last weight
        block -= 1
    start, chosen = block * BLOCK, -1
    for index in range(start, min(start + BLOCK, len(buffers.weights))):
        if buffers.weights[index] > 0.0:
            chosen = index
            target -= np.float64(buffers.weights[index])
            if target < 0.0:
                break
    return chosen


@compiled(**_EXACT)
def draw_rows(logits: Any, ask: Any, buffers: Buffers, out: Any, highest: Any) -> None:
    """Draw a token for each row that is asked for.

    Shape: logits [rows, vocabulary], float32, or bfloat16 as uint16; out int32 and highest float32 [rows asked]:
    where the highest logit of a drawn row is no finite number, nothing was drawn.
    """
    for entry in range(len(ask.row)):
        values = buffers.values
        _fill(logits[ask.row[entry]], values)
        _adjust(ask, entry, buffers)
        top = _highest(values)
        if _not_numbers(values) > np.float32(0.0):
            top = np.float32(np.nan)
        highest[entry] = top
        if ask.inverse_temperature[entry] == 0.0:
            place = 0
            while place < len(values) - 1 and values[place] != top:
                place += 1
            out[entry] = place
            continue
        out[entry] = 0
        if not abs(top) < np.float32(np.inf):
            continue
        scale = np.float32(ask.inverse_temperature[entry] * np.float64(LOG2_E))
        total = _weigh(values, top, scale, buffers)
        least, ties = np.float32(-np.inf), len(values)
        if 0 < ask.top_k[entry] < len(values):
            wanted = -np.float64(ask.top_k[entry])
            least, ties = _limit(wanted, total, top, scale, buffers, (least, ties))
            total = _keep(least, ties, np.float32(0.0), buffers)
        if ask.top_p[entry] < 1.0:
            wanted = ask.top_p[entry] * total
            least, ties = _limit(wanted, total, top, scale, buffers, (least, ties))
        if ask.top_p[entry] < 1.0 or ask.min_p[entry] > 0.0:
            total = _keep(least, ties, np.float32(ask.min_p[entry]), buffers)
        target = uniform(ask.key[entry, 0], ask.key[entry, 1]) * total
        out[entry] = _pick(target, buffers)


def warm_up() -> None:
    """Compile for bfloat16 and float32, so that the first request does not wait for it."""
    nothing: list[Any] = [np.empty(0, kind) for kind in ROW_DTYPES]
    nothing[ROW_FIELDS.index("key")] = np.empty((0, 2), np.uint64)
    nothing[ROW_FIELDS.index("mask")] = np.empty((0, 0), np.uint32)
    ask, buffers = RowParameters(*nothing), make_buffers(1)
    for tag in (BF16, FLOAT32):
        draw_rows(tag[None], ask, buffers, np.empty(0, np.int32), np.empty(0, np.float32))
