"""A kernel for the softmax between the two products of attention on the CPU in bfloat16.

torch's fused attention spends four nanoseconds on a score, more than on both products of it: the exponential. Here a
row of scores is read twice and written once where it lies, a tenth of that time.

See `kernels/elementwise.py` for rounding, addresses and threads.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from vsched_workers.backends.cpu.kernels.elementwise import halves, rounded
from vsched_workers.backends.cpu.kernels.numba_basics import as_float, compiled, exp2, larger

LOWEST = np.float32(-1e30)
"""Where the highest score of a row begins: finite, since the compiler may take infinities for impossible."""


@compiled()
def _soften_row(
    scores_at: int,
    width: int,
    seen: int,
    more: int,
    period: int,
    highest: Any,
    total: Any,
    summed: Any,
    row: int,
) -> None:
    """Soften one row, and fade what was summed for it before."""
    scores_at += 2 * row * width
    seen = min(seen + row % period * more, width)
    scores, unseen = halves(scores_at, seen), halves(scores_at + 2 * seen, width - seen)
    top = highest[row]
    for index in range(seen):
        top = larger(top, as_float(scores[index]))
    added = np.float32(0.0)
    for index in range(seen):
        weight = rounded(exp2(as_float(scores[index]) - top))
        scores[index] = weight
        added += as_float(weight)
    for index in range(width - seen):
        unseen[index] = 0
    fading = exp2(highest[row] - top)
    highest[row] = top
    total[row] = total[row] * fading + added
    if fading < np.float32(1.0):
        for index in range(summed.shape[1]):
            summed[row, index] *= fading


@compiled()
def soften(
    scores_at: int,
    width: int,
    seen: int,
    more: int,
    period: int,
    highest: Any,
    total: Any,
    summed: Any,
) -> None:
    """Replace rows of scores, which are powers of two, by their share of the highest, and keep an online softmax.

    Args:
        scores_at: Address of bfloat16 scores, [rows, width]; they become weights.
        width: Scores of a row.
        seen: How many of them the first row of each period sees; the rest become zero.
        more: How many more each further row of a period sees: 1 is causal, 0 is all alike.
        period: How many rows that rule goes for, before it begins anew.
        highest: The highest score of each row so far, float32 [rows].
        total: The sum of each row's weights so far, float32 [rows].
        summed: The values summed so far by weight, float32 [rows, head dim]; they fade where there is a higher score.
    """
    for row in range(len(highest)):
        _soften_row(scores_at, width, seen, more, period, highest, total, summed, row)


@compiled(parallel=True)
def soften_parallel(
    scores_at: int,
    width: int,
    seen: int,
    more: int,
    period: int,
    highest: Any,
    total: Any,
    summed: Any,
) -> None:
    """As `soften`, on all threads."""
    for row in numba.prange(len(highest)):
        _soften_row(scores_at, width, seen, more, period, highest, total, summed, row)


def warm_up(*, threads: int) -> None:
    """Compile, so that the first request does not wait for it."""
    one, summed = np.empty(0, dtype=np.float32), np.empty((0, 1), dtype=np.float32)
    for kernel in (soften, soften_parallel)[: 1 + (threads > 1)]:
        kernel(0, 1, 1, 0, 1, one, one, summed)
