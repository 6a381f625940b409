"""Quantization of weights to int4, as `quantized.weights` defines it, with the same scales and values.

torch passes over a weight some thirty times: in turns on two busy threads of Zen 3, it quantized 10 million values a
second, and these kernels more than 300 million.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np

from vsched_workers.backends.cpu.kernels.compilation import LONG, compiled, kernel
from vsched_workers.backends.cpu.kernels.thread_pool import spread

_LEAST, _MOST, _CENTRE = np.float32(-8), np.float32(7), np.float32(8)
# Sums may be reordered. Divisions stay exact, since values are rounded.
_REORDERED = {"reassoc"}


@compiled(fastmath=_REORDERED)
def _find_largest(row: int, weight: Any, largest: Any) -> None:
    for group in range(weight.shape[1]):
        values = weight[row, group]
        low, high = values[0], values[0]
        for place in range(1, len(values)):
            low, high = min(low, values[place]), max(high, values[place])
        largest[row, group] = low if -low > high else high
        if -low == high:
            for value in values:
                if abs(value) == high:
                    largest[row, group] = value
                    break


@compiled(fastmath=_REORDERED)
def _divisor(scale: Any) -> Any:
    return scale if scale != np.float32(0) else np.float32(1)


@compiled(fastmath=_REORDERED)
def _rounded(value: Any, divisor: Any) -> Any:
    return min(max(np.rint(value / divisor), _LEAST), _MOST)


@compiled(fastmath=_REORDERED)
def _error_of(values: Any, scale: Any) -> Any:
    divisor, total = _divisor(scale), np.float32(0)
    for place in range(len(values)):
        apart = _rounded(values[place], divisor) * scale - values[place]
        total += apart * apart
    return total


@compiled(fastmath=_REORDERED)
def _round_row(row: int, weight: Any, candidates: Any, scales: Any, pairs: Any) -> None:
    half = weight.shape[2] // 2
    for group in range(weight.shape[1]):
        values = weight[row, group]
        best = candidates[0, row, group]
        least = _error_of(values, best)
        for candidate in range(1, len(candidates)):
            scale = candidates[candidate, row, group]
            error = _error_of(values, scale)
            if error < least:
                best, least = scale, error
        scales[row, group] = best
        divisor = _divisor(best)
        for pair in range(half):
            low = _rounded(values[2 * pair], divisor) + _CENTRE
            high = _rounded(values[2 * pair + 1], divisor) + _CENTRE
            pairs[row, group * half + pair] = np.uint8(
                np.uint8(low) | np.uint8(high) << np.uint8(4)
            )


@kernel(LONG, None, None)
def find_largest(pool: int, weight: Any, largest: Any) -> None:
    """Write the value of the largest magnitude in each group, the first of several.

    Shape: weight [outputs, groups, group] and largest [outputs, groups] of float32.
    """
    spread(pool, len(weight), 1, _find_largest, (weight, largest))


@kernel(LONG, None, None, None, None)
def round_int4(pool: int, weight: Any, candidates: Any, scales: Any, pairs: Any) -> None:
    """Choose the scale of each group with the least squared error, and round the values.

    Shape: weight [outputs, groups, group], candidates [candidates, outputs, groups] and scales [outputs, groups] of
    float32, pairs [outputs, inputs / 2] of uint8, the first input in the low nibble.
    """
    spread(pool, len(weight), 1, _round_row, (weight, candidates, scales, pairs))
