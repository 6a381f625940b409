"""Online softmax of tiled attention, for bfloat16 scores.

torch's fused attention spends four nanoseconds per score on the exponential, more than on both of its products. Here
a row of scores is read twice and written once in place, in a tenth of that time.

For each row the state is the maximum score m, the sum l of weights, and the weighted sum a of values, over all tiles
so far. For another tile of scores s, which are logarithms to the base 2,

    m' = max(m, max_i s_i),   w_i = 2**(s_i - m')  (rounded),   l' = l * 2**(m - m') + sum_i w_i,   a' = a * 2**(m - m')

The weights replace the scores, and the caller adds the product of weights and values to a'. At the end a / l is the
attention output.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., "FlashAttention"
(NeurIPS 2022).
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, exp2, larger, narrow, widen
from vsched_workers.backends.cpu.kernels.compilation import compiled
from vsched_workers.backends.cpu.kernels.thread_pool import rows_together, spread

SCORE_MIN = np.float32(-1e30)
"""Initial maximum of a row: finite, since the compiler may assume the absence of infinities."""


class OnlineSoftmax(NamedTuple):
    """Online softmax state of each row.

    Attributes:
        highest: m, float32 [rows], initially `SCORE_MIN`.
        total: l, float32 [rows], initially 0.
        summed: a, float32 [rows, head_dim], initially 0.
    """

    highest: npt.NDArray[np.float32]
    total: npt.NDArray[np.float32]
    summed: npt.NDArray[np.float32]


@compiled()
def _softmax_row(scores_at: int, width: int, seen: int, online: OnlineSoftmax, row: int) -> None:
    scores, unseen = bf16_array(scores_at, seen), bf16_array(scores_at + 2 * seen, width - seen)
    top = online.highest[row]
    for index in range(seen):
        top = larger(top, widen(scores[index]))
    added = np.float32(0.0)
    for index in range(seen):
        weight = narrow(exp2(widen(scores[index]) - top))
        scores[index] = weight
        added += widen(weight)
    for index in range(width - seen):
        unseen[index] = 0
    fading = exp2(online.highest[row] - top)
    online.highest[row] = top
    online.total[row] = online.total[row] * fading + added
    if fading < np.float32(1.0):
        for index in range(online.summed.shape[1]):
            online.summed[row, index] *= fading


@compiled()
def _softmax_tile_rows(
    first: int,
    stop: int,
    scores_at: int,
    width: int,
    seen: int,
    step: int,
    period: int,
    online: OnlineSoftmax,
) -> None:
    for row in range(first, stop):
        seen_by_row = min(seen + row % period * step, width)
        _softmax_row(scores_at + 2 * row * width, width, seen_by_row, online, row)


@compiled()
def softmax_tile(
    pool: int, scores_at: int, width: int, seen: int, step: int, period: int, online: OnlineSoftmax
) -> None:
    """Replace a tile of scores by weights and update the online softmax.

    Args:
        pool: Address of the thread pool's state, 0 for the calling thread.
        scores_at: Scores, bfloat16 [rows, width].
        width: Scores of a row.
        seen: Scores that the first row of each period sees; later ones become 0.
        step: Additional scores seen by each further row of a period: 1 is causal, 0 has no mask.
        period: Rows after which the mask repeats.
        online: Online softmax of the rows.
    """
    given = scores_at, width, seen, step, period, online
    spread(pool, len(online.highest), rows_together(width), _softmax_tile_rows, given)


def warm_up() -> None:
    """Compile ahead of the first request."""
    nothing = np.empty(0, dtype=np.float32)
    online = OnlineSoftmax(nothing, nothing, np.empty((0, 1), dtype=np.float32))
    softmax_tile(0, 0, 1, 1, 0, 1, online)
