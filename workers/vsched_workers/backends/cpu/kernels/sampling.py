"""Token sampling, row by row, in a few passes over the vocabulary, without sorting.

A row is widened into a buffer that stays in the L2 cache; penalties and logit biases are applied there. The weight of
a token is 2**-d, with its distance d in octaves from the maximum logit. Top-k and top-p keep the tokens above a limit,
and the first ones of those equal to it. The limit is found by bisection: it is the highest logit such that all tokens
from there on have the wanted mass. Usually few tokens are kept: the k-th highest among the maximum logits of all
blocks is at most the k-th highest logit, so that the tokens from there on are listed, and the limit is searched in the
list. Otherwise it is searched in the whole row. The draw walks over sums of blocks and then within one block, in order
of token ids.

A row is computed alone and in a fixed order of sums, so the drawn token does not depend on other rows in the batch.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), for Philox.
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

from vsched_workers.backends.cpu.kernels.bf16 import (
    LOG2_E,
    bf16_array,
    maximum,
    ordered,
    power_of_two,
    widen,
)
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits

BLOCK = 256
"""Weights that are summed in float32, before their sums are added in float64."""
HEAD = 64
"""Minimum length of the list in which top-p is tried first."""
_OCTAVES_MAX = np.float32(126.0)
"""A token this far below the maximum has no weight."""
_SERIES = tuple(np.float32(math.log(2.0) ** power / math.factorial(power)) for power in range(7))

# Infinite logits are forbidden tokens and NaN is an error, so the compiler must not assume their
# absence.
EXACT = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}}
INNER = EXACT | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options for functions that only compiled code calls: a Python wrapper takes as long to compile as the function."""


class Buffers(NamedTuple):
    """Buffers for a row, reused in every step; `counts` and `outputs` are zero between rows.

    `values` are padded to whole blocks, with logits of -inf, and `all_ids` are their indices. `tops` is the maximum
    logit of each block. `ids` and `list_values` are a list of tokens in order of ids. `weights` and the `sums` of their
    blocks are those of the list or of the row.

    Shape: `values`, `weights`, `ones`, `list_values` float32 [tokens]; `tops` float32, `sums` float64 [blocks];
    `all_ids`, `ids`, `counts`, `outputs` int32 [tokens].
    """

    values: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    ones: npt.NDArray[np.float32]
    tops: npt.NDArray[np.float32]
    sums: npt.NDArray[np.float64]
    all_ids: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    list_values: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    outputs: npt.NDArray[np.int32]


def make_buffers(vocabulary: int) -> Buffers:
    """Allocate buffers for a vocabulary size."""
    blocks = -(-vocabulary // BLOCK)
    tokens = blocks * BLOCK
    return Buffers(
        np.full(tokens, -np.inf, np.float32),
        np.empty(tokens, np.float32),
        np.ones(tokens, np.float32),
        np.empty(blocks, np.float32),
        np.empty(blocks, np.float64),
        np.arange(tokens, dtype=np.int32),
        np.empty(tokens, np.int32),
        np.empty(tokens, np.float32),
        np.zeros(tokens, np.int32),
        np.zeros(tokens, np.int32),
    )


ROW = np.dtype(
    [
        ("row", np.int64),
        ("inverse_temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("position", np.uint64),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("prompt", np.int64),
        ("tokens", np.int64, 2),
        ("biases", np.int64, 2),
        ("mask", np.int64),
    ]
)
"""Sampling parameters of a row of the logits; `inverse_temperature` is 0 for greedy, `top_k` 0 for all.

`tokens` and `biases` are ranges of the arrays in `RowLists`; the first `prompt` of the tokens are the prompt, and there
are none without penalties. `mask` is the index of its mask; -1 without one.
"""


class RowLists(NamedTuple):
    """Concatenated lists of rows.

    Attributes:
        tokens: Prompts and outputs.
        biased: Tokens with a logit bias.
        bias: The biases.
        masks: uint32 [masks, words]: bit i of word j allows token 32 j + i.
    """

    tokens: npt.NDArray[np.int32]
    biased: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    masks: npt.NDArray[np.uint32]


@compiled()
def argmax(logits_at: int, rows: int, width: int, out: Any) -> None:
    """Write the index of the maximum logit of every row, the first of equal ones.

    Shape: logits bfloat16 [rows, width]; out int32 [rows]. The loop over all logits only compares, so it is
    vectorized; the index is searched afterwards.
    """
    for row in range(rows):
        values = bf16_array(logits_at + 2 * row * width, width)
        highest = ordered(values[0])
        for index in range(width):
            highest = max(highest, ordered(values[index]))
        place = 0
        while ordered(values[place]) != highest:
            place += 1
        out[row] = place


@compiled(**INNER)
def _high_product(one: Any, other: Any) -> Any:
    """Upper 64 bits of a product of two uint64."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a, b, c, d = one >> half, one & low, other >> half, other & low
    middle = a * d + ((b * d) >> half)
    other_middle = b * c + (middle & low)
    return a * c + (middle >> half) + (other_middle >> half)


@compiled(**INNER)
def uniform(seed: Any, position: Any) -> Any:
    """First number in [0, 1) of numpy's Philox stream with this key; both uint64."""
    first, second = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
    c0, c1, c2, c3 = np.uint64(1), np.uint64(0), np.uint64(0), np.uint64(0)
    for turn in range(10):
        if turn > 0:
            seed += np.uint64(0x9E3779B97F4A7C15)
            position += np.uint64(0xBB67AE8584CAA73B)
        high, other = _high_product(first, c0), _high_product(second, c2)
        c0, c1, c2, c3 = other ^ c1 ^ seed, second * c2, high ^ c3 ^ position, first * c0
    return np.float64(c0 >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled(**INNER)
def _apply_penalties(params: Any, lists: RowLists, buffers: Buffers) -> None:
    tokens = lists.tokens[params.tokens[0] : params.tokens[1]]
    values, counts, outputs = buffers.values, buffers.counts, buffers.outputs
    for index in range(len(tokens)):
        if tokens[index] >= len(values):
            continue  # the lm_head may be narrower than the embedding
        counts[tokens[index]] = 1
        outputs[tokens[index]] += 1 if index >= params.prompt else 0
    for index in range(len(tokens)):
        token = tokens[index]
        if token >= len(values) or counts[token] == 0:
            continue
        value, times = values[token], outputs[token]
        value = value / params.repetition if value > 0 else value * params.repetition
        if times > 0:
            value -= params.presence + params.frequency * np.float32(times)
        values[token] = value
        counts[token] = 0
        outputs[token] = 0


@compiled(**INNER)
def _apply_mask(words: Any, values: Any) -> None:
    """Set the logits of forbidden tokens to -inf, 32 at a time: most words of a mask allow all or none."""
    for index in range(-(-len(values) // 32)):
        word = words[index] if index < len(words) else np.uint32(0)
        part = values[32 * index : 32 * index + 32]
        if word == np.uint32(0xFFFFFFFF):
            continue
        if word == np.uint32(0):
            for place in range(len(part)):
                part[place] = np.float32(-np.inf)
        else:
            for place in range(len(part)):
                allowed = (word >> np.uint32(place)) & np.uint32(1)
                part[place] = part[place] if allowed else np.float32(-np.inf)


@compiled(**INNER)
def _adjust(params: Any, lists: RowLists, buffers: Buffers) -> bool:
    """Apply penalties, logit biases and the mask; return False if there are none."""
    first, stop = params.biases[0], params.biases[1]
    if params.tokens[1] <= params.tokens[0] and stop <= first and params.mask < 0:
        return False
    _apply_penalties(params, lists, buffers)
    for index in range(first, stop):
        buffers.values[lists.biased[index]] += lists.bias[index]
    if params.mask >= 0:
        _apply_mask(lists.masks[params.mask], buffers.values)
    return True


@compiled(**INNER)
def _fill(source: Any, buffers: Buffers) -> Any:
    """Widen the logits of a row; same return value as `_find_tops`."""
    highest, odd = np.float32(-np.inf), np.float32(0.0)
    for block in range(len(buffers.tops)):
        read = source[block * BLOCK : (block + 1) * BLOCK]
        values = buffers.values[block * BLOCK : (block + 1) * BLOCK]
        top = np.float32(-np.inf)
        for index in range(len(read)):
            value = widen(read[index])
            values[index] = value
            top = maximum(top, value)
            # A sum of flags is vectorized, a search is not.
            odd += np.float32(1.0) if value != value else np.float32(0.0)
        buffers.tops[block] = top
        highest = maximum(highest, top)
    return np.float32(np.nan) if odd > np.float32(0.0) else highest


@compiled(**INNER)
def _find_tops(buffers: Buffers) -> Any:
    """Find the maximum logit of each block; return the overall maximum, NaN if any logit is."""
    highest, odd = np.float32(-np.inf), np.float32(0.0)
    for block in range(len(buffers.tops)):
        part = buffers.values[block * BLOCK : (block + 1) * BLOCK]
        top = part[0]
        for index in range(BLOCK):
            top = maximum(top, part[index])
            odd += np.float32(1.0) if part[index] != part[index] else np.float32(0.0)
        buffers.tops[block] = top
        highest = maximum(highest, top)
    return np.float32(np.nan) if odd > np.float32(0.0) else highest


@compiled(**INNER)
def _first(top: Any, buffers: Buffers) -> Any:
    """Return the first token with the maximum logit."""
    block = 0
    while block < len(buffers.tops) - 1 and buffers.tops[block] != top:
        block += 1
    place = block * BLOCK
    while place < len(buffers.values) - 1 and buffers.values[place] != top:
        place += 1
    return place


@emits(numba.int32, numba.float32)
def _rank(builder: Any, value: Any) -> Any:
    """Integer that orders as the float32 does: for negative values all bits except the sign are flipped."""
    word = ir.IntType(32)
    bits = builder.bitcast(value, word)
    sign = builder.ashr(bits, ir.Constant(word, 31))
    return builder.xor(bits, builder.lshr(sign, ir.Constant(word, 1)))


@emits(numba.float32, numba.int32)
def _of_rank(builder: Any, rank: Any) -> Any:
    """Inverse of `_rank`."""
    word = ir.IntType(32)
    sign = builder.ashr(rank, ir.Constant(word, 31))
    bits = builder.xor(rank, builder.lshr(sign, ir.Constant(word, 1)))
    return builder.bitcast(bits, ir.FloatType())


@compiled(**INNER)
def _power(octaves: Any) -> Any:
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
def _weigh(values: Any, top: Any, scale: Any, buffers: Buffers) -> Any:
    """Compute the weights of a list or row, and the sums of blocks; return their total."""
    total = 0.0
    for start in range(0, len(values), BLOCK):
        part = values[start : start + BLOCK]
        weights = buffers.weights[start : start + len(part)]
        added = np.float32(0.0)
        for index in range(len(part)):
            weight = _power((top - part[index]) * scale)
            weights[index] = weight
            added += weight
        buffers.sums[start // BLOCK] = added
        total += added
    return total


@compiled(**INNER)
def _mass(values: Any, weights: Any, least: Any) -> Any:
    """Sum of the weights of logits that are at least `least`."""
    total = 0.0
    for start in range(0, len(values), BLOCK):
        part, heavy = values[start : start + BLOCK], weights[start : start + BLOCK]
        added = np.float32(0.0)
        for index in range(len(part)):
            added += heavy[index] if part[index] >= least else np.float32(0.0)
        total += added
    return total


@compiled(**INNER)
def _limit(values: Any, weights: Any, wanted: Any, top: Any) -> Any:
    """Return (logit, ties): the minimum kept logit, and the number of kept tokens equal to it.

    Kept are the highest logits up to the wanted mass, which is at most that of all; the first one in any case.
    """
    low, high = _rank(np.float32(-np.inf)), _rank(top) + 1
    while high - low > 1:
        middle = np.int32(low + (np.int64(high) - low) // 2)
        if _mass(values, weights, _of_rank(middle)) >= wanted:
            low = middle
        else:
            high = middle
    limit, weight = _of_rank(low), np.float32(1.0)
    for index in range(len(values)):
        if values[index] == limit:
            weight = weights[index]
            break
    above = _mass(values, weights, _of_rank(high)) if limit < top else 0.0
    return limit, max(math.ceil((wanted - above) / weight), 1)


@compiled(**INNER)
def _drop_others(values: Any, limit: Any, ties: Any, buffers: Buffers) -> Any:
    """Set the weights of tokens that are not kept to 0, and recompute the sums of blocks; return the total."""
    total = 0.0
    for start in range(0, len(values), BLOCK):
        part = values[start : start + BLOCK]
        weights = buffers.weights[start : start + len(part)]
        added = np.float32(0.0)
        for index in range(len(part)):
            if part[index] < limit or (part[index] == limit and ties <= 0):
                weights[index] = np.float32(0.0)
            ties -= 1 if part[index] == limit else 0
            added += weights[index]
        buffers.sums[start // BLOCK] = added
        total += added
    return total


@compiled(**INNER)
def _drop_light(weight_min: Any, total: Any, count: int, buffers: Buffers) -> Any:
    """Set weights below `weight_min` to 0, and recompute the sums of blocks; return the total."""
    if weight_min <= np.float32(0.0):
        return total
    total = 0.0
    for start in range(0, count, BLOCK):
        weights = buffers.weights[start : min(start + BLOCK, count)]
        added = np.float32(0.0)
        for index in range(len(weights)):
            weights[index] = weights[index] if weights[index] >= weight_min else np.float32(0.0)
            added += weights[index]
        buffers.sums[start // BLOCK] = added
        total += added
    return total


@compiled(**INNER)
def _list_head(wanted: int, top: Any, buffers: Buffers) -> int:
    """List at least the `wanted` highest logits, from the blocks that have any; return their number."""
    blocks = len(buffers.tops)
    low, _ = _limit(buffers.tops, buffers.ones[:blocks], np.float64(wanted), top)
    count = 0
    for block in range(blocks):
        if buffers.tops[block] < low:
            continue
        for token in range(block * BLOCK, (block + 1) * BLOCK):
            buffers.ids[count] = token
            buffers.list_values[count] = buffers.values[token]
            count += 1 if buffers.values[token] >= low else 0
    return count


@compiled(**INNER)
def _pick(target: Any, count: int, buffers: Buffers) -> int:
    """Return the index of the first weight at which the cumulative weight exceeds `target`."""
    block, last = 0, (count - 1) // BLOCK
    while block < last and target >= buffers.sums[block]:
        target -= buffers.sums[block]
        block += 1
    while block > 0 and buffers.sums[block] == 0.0:  # rounding has led past the last weight
        block -= 1
    chosen = 0
    for index in range(block * BLOCK, min((block + 1) * BLOCK, count)):
        weight = buffers.weights[index]
        if weight > np.float32(0.0):
            chosen = index
            target -= np.float64(weight)
            if target < 0.0:
                break
    return chosen


@compiled(**INNER)
def _draw(params: Any, top: Any, buffers: Buffers) -> Any:
    """Draw the token of a row; its logits and maxima are in the buffers."""
    number = uniform(params.seed, params.position)
    scale = np.float32(params.inverse_temperature * np.float64(LOG2_E))
    top_k, top_p = params.top_k, params.top_p
    values, ids = buffers.values, buffers.all_ids
    if top_k >= len(values):
        top_k = 0
    total = 0.0 if top_k > 0 else _weigh(values, top, scale, buffers)
    wanted = top_p * total
    if (top_k > 0 or top_p < 1.0) and (top_k or HEAD) <= len(buffers.tops):
        count = _list_head(top_k or HEAD, top, buffers)
        if _weigh(buffers.list_values[:count], top, scale, buffers) >= wanted:
            values, ids = buffers.list_values[:count], buffers.ids
        total = 0.0
    if total == 0.0:
        total = _weigh(values, top, scale, buffers)
    weights = buffers.weights[: len(values)]
    if top_k > 0:
        limit, ties = _limit(values, buffers.ones[: len(values)], np.float64(top_k), top)
        total = _drop_others(values, limit, ties, buffers)
        wanted = top_p * total
    if top_p < 1.0:
        limit, ties = _limit(values, weights, wanted, top)
        total = _drop_others(values, limit, ties, buffers)
    total = _drop_light(np.float32(params.min_p), total, len(values), buffers)
    return ids[_pick(number * total, len(values), buffers)]


@compiled(**EXACT)
def draw_rows(
    halves: Any, singles: Any, rows: Any, lists: RowLists, buffers: Buffers, out: Any, highest: Any
) -> None:
    """Draw a token for each of `rows`, `ROW` [requested rows].

    Shape: logits [rows, vocabulary], bfloat16 as uint16 in `halves` or float32 in `singles`, the other one empty; out
    int32 and highest float32 [requested rows]. Nothing is drawn for a row whose `highest` is not finite.
    """
    for entry in range(len(rows)):
        params = rows[entry]
        row = params.row
        top = _fill(halves[row], buffers) if len(halves) else _fill(singles[row], buffers)
        if _adjust(params, lists, buffers):
            top = _find_tops(buffers)
        highest[entry] = top
        if params.inverse_temperature == 0.0:
            out[entry] = _first(top, buffers)
        elif abs(top) < np.float32(np.inf):
            out[entry] = _draw(params, top, buffers)
        else:
            out[entry] = 0


def warm_up() -> None:
    """Compile ahead of the first request."""
    lists = RowLists(
        np.empty(0, np.int32),
        np.empty(0, np.int64),
        np.empty(0, np.float32),
        np.empty((0, 0), np.uint32),
    )
    halves, singles = np.empty((0, 1), np.uint16), np.empty((0, 1), np.float32)
    out, highest = np.empty(0, np.int32), np.empty(0, np.float32)
    draw_rows(halves, singles, np.empty(0, ROW), lists, make_buffers(1), out, highest)


def warm_up_greedy() -> None:
    """Compile `argmax`."""
    argmax(0, 0, 1, np.empty(0, dtype=np.int32))
