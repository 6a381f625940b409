"""Residual sum and RMS norm, of bfloat16 rows.

    hidden <- hidden + delta                                   (rounded)
    out     = weight * (hidden / sqrt(mean(hidden^2) + eps))   (both products rounded)

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (NeurIPS 2019).
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, narrow, through_bf16, widen
from vsched_workers.backends.cpu.kernels.compilation import compiled, threaded


@compiled()
def _norm_row(hidden: Any, weight: Any, squares: Any, eps: Any, out: Any) -> None:
    """Write the norm of a row, the sum of whose squares is known."""
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(len(weight)) + eps)
    for index in range(len(weight)):
        value = through_bf16(widen(hidden[index]) * scale)
        out[index] = narrow(widen(weight[index]) * value)


@compiled()
def _add_norm_row(
    hidden_at: int, delta_at: int, weight_at: int, width: int, eps: Any, out_at: int
) -> None:
    hidden = bf16_array(hidden_at, width)
    squares = np.float32(0.0)
    if delta_at:
        delta = bf16_array(delta_at, width)
        for index in range(width):
            total = narrow(widen(hidden[index]) + widen(delta[index]))
            hidden[index] = total
            squares += widen(total) * widen(total)
    else:
        for index in range(width):
            squares += widen(hidden[index]) * widen(hidden[index])
    _norm_row(hidden, bf16_array(weight_at, width), squares, eps, bf16_array(out_at, width))


@threaded
def add_norm(
    hidden_at: int, delta_at: int, weight_at: int, width: int, eps: Any, out_at: int, rows: int
) -> None:
    """Add `delta` to `hidden` in place and write the norms of the sums to `out`.

    Shape: hidden, delta, out [rows, width]; weight [width]. A `delta_at` of 0 adds nothing.
    """
    for row in numba.prange(rows):
        skip = 2 * row * width
        delta_row_at = delta_at + skip if delta_at else 0
        _add_norm_row(hidden_at + skip, delta_row_at, weight_at, width, eps, out_at + skip)


def warm_up(*, threads: int) -> None:
    """Compile now, so that the first request does not wait for it."""
    for kernel in add_norm.needed(threads):
        kernel(0, 0, 0, 1, np.float32(1.0), 0, 0)
