"""Token sampling, row by row, in a few passes over the vocabulary, without sorting.

A row is widened into a buffer that stays in the L2 cache; penalties and logit biases are applied there. The weight of
a token is 2**-d, with its distance d in octaves from the maximum logit. `kept_tokens.py` finds the tokens that top-k
and top-p keep, usually a short list, from which the token is drawn. Otherwise the draw walks over sums of blocks and
then within one block, in order of token ids.

A row is computed alone and in a fixed order of sums, so the drawn token does not depend on other rows in the batch.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), for Philox.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call,assignment"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vsched_workers.backends.cpu.kernels.bf16 import LOG2_E, bf16_array, larger, ordered, widen
from vsched_workers.backends.cpu.kernels.compilation import compiled
from vsched_workers.backends.cpu.kernels.kept_tokens import (
    BLOCK,
    EXACT,
    HEAD,
    INNER,
    Buffers,
    limit_list,
    limit_row,
    list_head,
    make_buffers,
    power,
    weigh,
    weigh_list,
)


class RowParameters(NamedTuple):
    """Sampling parameters of rows; arrays are [rows] unless noted.

    Attributes:
        row: Row of the logits.
        inverse_temperature: 0 for greedy.
        top_k: 0 for all.
        key: uint64 [rows, 2], seed and position of the draw.
        tokens: Concatenated prompts and outputs, [starts[row], starts[row + 1]) for a row; the first `prompts[row]`
            of them are the prompt. Empty without penalties.
        bias: Logit biases, for the tokens `biased`; [bias_starts[row], ...) for a row.
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
"""Dtypes of the arrays of `RowParameters`, in order."""


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
def _apply_penalties(params: Any, entry: int, buffers: Buffers) -> None:
    tokens = params.tokens[params.starts[entry] : params.starts[entry + 1]]
    values, counts, outputs = buffers.values, buffers.counts, buffers.outputs
    for index in range(len(tokens)):
        if tokens[index] >= len(values):
            continue  # the lm_head may be narrower than the embedding
        counts[tokens[index]] = 1
        outputs[tokens[index]] += 1 if index >= params.prompts[entry] else 0
    repetition = params.repetition[entry]
    for index in range(len(tokens)):
        token = tokens[index]
        if token >= len(values) or counts[token] == 0:
            continue
        value, times = values[token], outputs[token]
        value = value / repetition if value > 0 else value * repetition
        if times > 0:
            value -= params.presence[entry] + params.frequency[entry] * np.float32(times)
        values[token] = value
        counts[token] = 0
        outputs[token] = 0


@compiled(**INNER)
def _is_adjusted(params: Any, entry: int) -> Any:
    history = params.starts[entry + 1] - params.starts[entry]
    return (
        history > 0
        or params.bias_starts[entry + 1] > params.bias_starts[entry]
        or params.mask_of[entry] >= 0
    )


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
def _adjust(params: Any, entry: int, buffers: Buffers) -> None:
    values = buffers.values
    _apply_penalties(params, entry, buffers)
    for index in range(params.bias_starts[entry], params.bias_starts[entry + 1]):
        values[params.biased[index]] += params.bias[index]
    if params.mask_of[entry] >= 0:
        _apply_mask(params.mask[params.mask_of[entry]], values)


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
            top = larger(top, value)
            # A sum of flags is vectorized, a search is not.
            odd += np.float32(1.0) if value != value else np.float32(0.0)
        buffers.tops[block] = top
        highest = larger(highest, top)
    return np.float32(np.nan) if odd > np.float32(0.0) else highest


@compiled(**INNER)
def _find_tops(buffers: Buffers) -> Any:
    """Find the maximum logit of each block; return the overall maximum, NaN if any logit is."""
    highest, odd = np.float32(-np.inf), np.float32(0.0)
    for block in range(len(buffers.tops)):
        part = buffers.values[block * BLOCK : (block + 1) * BLOCK]
        top = part[0]
        for index in range(BLOCK):
            top = larger(top, part[index])
            odd += np.float32(1.0) if part[index] != part[index] else np.float32(0.0)
        buffers.tops[block] = top
        highest = larger(highest, top)
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


@compiled(**INNER)
def _pick(total: Any, uniform: Any, kept: Any, weight_min: Any, buffers: Buffers) -> Any:
    """Return the first kept token at which the cumulative weight exceeds the fraction `uniform` of the total.

    Kept tokens are above the limit `kept`, or equal to it up to its last token, with a weight of at least
    `weight_min`.
    """
    least, last_tie = kept
    target, block, last = uniform * total, 0, len(buffers.sums) - 1
    while block < last and target >= buffers.sums[block]:
        target -= buffers.sums[block]
        block += 1
    while block > 0 and buffers.sums[block] == 0.0:  # rounding has led past the last weight
        block -= 1
    chosen = -1
    for index in range(block * BLOCK, (block + 1) * BLOCK):
        value, weight = buffers.values[index], buffers.weights[index]
        above = value > least or (value == least and index <= last_tie)
        if above and weight > 0.0 and weight >= weight_min:
            chosen = index
            target -= np.float64(weight)
            if target < 0.0:
                break
    return chosen


@compiled(**INNER)
def _sum_kept(kept: Any, weight_min: Any, buffers: Buffers) -> Any:
    """Recompute the sums of blocks from kept weights; return their total."""
    total, (least, last_tie) = 0.0, kept
    for block in range(len(buffers.sums)):
        start = block * BLOCK
        part = buffers.values[start : start + BLOCK]
        weights = buffers.weights[start : start + BLOCK]
        added = np.float32(0.0)
        for index in range(BLOCK):
            above = part[index] > least or (part[index] == least and start + index <= last_tie)
            above = above and weights[index] >= weight_min
            added += weights[index] if above else np.float32(0.0)
        buffers.sums[block] = added
        total += added
    return total


@compiled(**INNER)
def _drop_others(kept: Any, buffers: Buffers) -> None:
    """Set the logits of all other tokens to -inf and their weights to 0."""
    least, last_tie = kept
    for index in range(len(buffers.values)):
        value = buffers.values[index]
        if not (value > least or (value == least and index <= last_tie)):
            buffers.values[index] = np.float32(-np.inf)
            buffers.weights[index] = np.float32(0.0)


@compiled(**INNER)
def _pick_from_list(count: int, uniform: Any, weight_min: Any, buffers: Buffers) -> Any:
    """Like `_pick`, from a list of `count` tokens."""
    total = 0.0
    for place in range(count):
        weight = buffers.list_weights[place]
        total += np.float64(weight) if weight >= weight_min else 0.0
    target, chosen = uniform * total, -1
    for place in range(count):
        weight = buffers.list_weights[place]
        if weight > 0.0 and weight >= weight_min:
            chosen = place
            target -= np.float64(weight)
            if target < 0.0:
                break
    return buffers.ids[chosen]


@compiled(**INNER)
def _draw_from_list(
    params: Any, entry: int, head: Any, uniform: Any, scale: Any, top: Any, buffers: Buffers
) -> Any:
    """Draw from the short list that top-k keeps: no other token needs a weight."""
    count, low = head
    weigh_list(count, top, scale, np.float32(1.0), buffers)
    wanted = np.float64(params.top_k[entry])
    count = limit_list(count, wanted, low, top, scale, np.float32(1.0), buffers)
    weigh_list(count, top, scale, np.float32(0.0), buffers)
    if params.top_p[entry] < 1.0:
        total = 0.0
        for place in range(count):
            total += np.float64(buffers.list_weights[place])
        wanted = params.top_p[entry] * total
        count = limit_list(count, wanted, low, top, scale, np.float32(0.0), buffers)
    return _pick_from_list(count, uniform, np.float32(params.min_p[entry]), buffers)


@compiled(**INNER)
def _draw(params: Any, entry: int, top: Any, buffers: Buffers) -> Any:
    """Draw the token of a row; its logits and maxima are in the buffers."""
    number = uniform(params.key[entry, 0], params.key[entry, 1])
    scale = np.float32(params.inverse_temperature[entry] * np.float64(LOG2_E))
    top_k, top_p, min_p = params.top_k[entry], params.top_p[entry], np.float32(params.min_p[entry])
    if 0 < top_k <= len(buffers.tops) // 2:
        head = list_head(top_k, top, scale, buffers)
        return _draw_from_list(params, entry, head, number, scale, top, buffers)
    everything = (np.float32(-np.inf), len(buffers.values))
    all_weigh = top_p < 1.0 or top_k > 0
    total = weigh(top, scale, np.float32(0.0) if all_weigh else min_p, buffers)
    if 0 < top_k < len(buffers.values):
        kept = limit_row(np.float64(top_k), total, top, scale, np.float32(1.0), buffers)
        _drop_others(kept, buffers)
        _find_tops(buffers)
        total = _sum_kept(everything, np.float32(0.0), buffers)
    kept = everything
    if top_p < 1.0:
        wanted = top_p * total
        count, low = list_head(HEAD, top, scale, buffers)
        if weigh_list(count, top, scale, np.float32(0.0), buffers) >= wanted:
            count = limit_list(count, wanted, low, top, scale, np.float32(0.0), buffers)
            return _pick_from_list(count, number, min_p, buffers)
        kept = limit_row(wanted, total, top, scale, np.float32(0.0), buffers)
        total = 0.0
        for block in range(len(buffers.sums)):
            total += buffers.sums[block]
    if all_weigh and min_p > 0.0 and power((top - kept[0]) * scale) < min_p:
        total = _sum_kept(kept, min_p, buffers)
    return _pick(total, number, kept, min_p, buffers)


@compiled(**EXACT)
def draw_rows(
    halves: Any, singles: Any, params: Any, buffers: Buffers, out: Any, highest: Any
) -> None:
    """Draw a token for each requested row.

    Shape: logits [rows, vocabulary], bfloat16 as uint16 in `halves` or float32 in `singles`, the other one empty; out
    int32 and highest float32 [requested rows]. Nothing is drawn for a row whose `highest` is not finite.
    """
    for entry in range(len(params.row)):
        row = params.row[entry]
        top = _fill(halves[row], buffers) if len(halves) else _fill(singles[row], buffers)
        if _is_adjusted(params, entry):
            _adjust(params, entry, buffers)
            top = _find_tops(buffers)
        highest[entry] = top
        if params.inverse_temperature[entry] == 0.0:
            out[entry] = _first(top, buffers)
        elif abs(top) < np.float32(np.inf):
            out[entry] = _draw(params, entry, top, buffers)
        else:
            out[entry] = 0


def warm_up() -> None:
    """Compile ahead of the first request."""
    nothing: list[Any] = [np.empty(0, kind) for kind in ROW_DTYPES]
    nothing[ROW_FIELDS.index("key")] = np.empty((0, 2), np.uint64)
    nothing[ROW_FIELDS.index("mask")] = np.empty((0, 0), np.uint32)
    halves, singles = np.empty((0, 1), np.uint16), np.empty((0, 1), np.float32)
    out, highest = np.empty(0, np.int32), np.empty(0, np.float32)
    draw_rows(halves, singles, RowParameters(*nothing), make_buffers(1), out, highest)


def warm_up_greedy() -> None:
    """Compile `argmax`."""
    argmax(0, 0, 1, np.empty(0, dtype=np.int32))
