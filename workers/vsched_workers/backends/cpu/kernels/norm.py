"""Residual add, and RMS norm or LayerNorm, of bfloat16 rows.

    hidden <- hidden + delta                                   (rounded)
    out     = weight * (hidden / sqrt(mean(hidden^2) + eps))   (both products rounded)
    out     = weight * (hidden - mean(hidden)) / sqrt(variance(hidden) + eps) + bias       (LayerNorm)

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (NeurIPS 2019).
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vsched_workers.backends.cpu.kernels.bf16 import (
    bf16_array,
    copy,
    float32_array,
    narrow,
    through_bf16,
    widen,
)
from vsched_workers.backends.cpu.kernels.compilation import LONG, SINGLE, array_of, compiled, kernel
from vsched_workers.backends.cpu.kernels.thread_pool import rows_together, spread


@compiled()
def _norm_row(hidden: Any, weight: Any, squares: Any, eps: Any, out: Any) -> None:
    """Write the RMS norm of a row, given its sum of squares."""
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(len(weight)) + eps)
    for index in range(len(weight)):
        value = through_bf16(widen(hidden[index]) * scale)
        out[index] = narrow(widen(weight[index]) * value)


@compiled()
def _add_norm_row(
    row: int, hidden_at: int, delta_at: int, weight_at: int, width: int, eps: Any, out_at: int
) -> None:
    skip = 2 * row * width
    hidden, out = bf16_array(hidden_at + skip, width), bf16_array(out_at + skip, width)
    squares = np.float32(0.0)
    if delta_at:
        delta = bf16_array(delta_at + skip, width)
        for index in range(width):
            total = narrow(widen(hidden[index]) + widen(delta[index]))
            hidden[index] = total
            squares += widen(total) * widen(total)
    else:
        for index in range(width):
            squares += widen(hidden[index]) * widen(hidden[index])
    _norm_row(hidden, bf16_array(weight_at, width), squares, eps, out)


@kernel(*[LONG] * 5, SINGLE, LONG, LONG)
def add_norm(
    pool: int,
    hidden_at: int,
    delta_at: int,
    weight_at: int,
    width: int,
    eps: Any,
    out_at: int,
    rows: int,
) -> None:
    """Add `delta` to `hidden` in place and write the norms of the sums to `out`.

    Shape: hidden, delta, out [rows, width]; weight [width]. A `delta_at` of 0 adds nothing.
    """
    arguments = hidden_at, delta_at, weight_at, width, eps, out_at
    spread(pool, rows, rows_together(width), _add_norm_row, arguments)


NORM = np.dtype(
    [("weight_at", np.int64), ("eps", np.float32), ("once", np.int64), ("bias_at", np.int64)]
)
"""A norm, an array of one record: address of its weights, 0 if there is no norm, and epsilon.

The weights are bfloat16; or, if `once` is 1, float32, and only the result is rounded. With a `bias_at` other than 0 it
is a LayerNorm, with a bfloat16 bias.
"""
_NORMS = array_of(NORM)


@compiled()
def _layer_norm_row(values: Any, weight: Any, bias: Any, eps: Any, out: Any) -> None:
    count = np.float32(len(values))
    total = squares = np.float32(0.0)
    for index in range(len(values)):
        total += widen(values[index])
    mean = total / count
    for index in range(len(values)):
        squares += (widen(values[index]) - mean) ** 2
    scale = np.float32(1.0) / np.sqrt(squares / count + eps)
    for index in range(len(values)):
        normed = (widen(values[index]) - mean) * scale
        out[index] = narrow(normed * widen(weight[index]) + widen(bias[index]))


@compiled()
def _any_norm_row(values: Any, norm: Any, out: Any) -> None:
    width = len(values)
    if norm.bias_at:
        weight, bias = bf16_array(norm.weight_at, width), bf16_array(norm.bias_at, width)
        _layer_norm_row(values, weight, bias, norm.eps, out)
        return
    squares = np.float32(0.0)
    for index in range(width):
        squares += widen(values[index]) * widen(values[index])
    if norm.once:
        weight = float32_array(norm.weight_at, width)
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + norm.eps)
        for index in range(width):
            out[index] = narrow(weight[index] * (widen(values[index]) * scale))
    else:
        _norm_row(values, bf16_array(norm.weight_at, width), squares, norm.eps, out)


@compiled()
def _add_row(hidden: Any, delta: Any, factor: Any) -> None:
    if factor == np.float32(1.0):
        for index in range(len(hidden)):
            hidden[index] = narrow(widen(hidden[index]) + widen(delta[index]))
    else:
        for index in range(len(hidden)):
            added = through_bf16(widen(delta[index]) * factor)
            hidden[index] = narrow(widen(hidden[index]) + added)


@compiled()
def _add_normed_row(
    row: int,
    hidden_at: int,
    delta_at: int,
    added_norm: Any,
    factor: Any,
    norm: Any,
    width: int,
    out_at: int,
) -> None:
    skip = 2 * row * width
    hidden = bf16_array(hidden_at + skip, width)
    if delta_at:
        delta = bf16_array(delta_at + skip, width)
        if added_norm[0].weight_at:
            _any_norm_row(delta, added_norm[0], delta)
        _add_row(hidden, delta, factor)
    if norm[0].weight_at:
        _any_norm_row(hidden, norm[0], bf16_array(out_at + skip, width))
    else:
        copy(hidden_at + skip, out_at + skip, width)


@kernel(LONG, LONG, LONG, _NORMS, SINGLE, _NORMS, LONG, LONG, LONG)
def add_normed(
    pool: int,
    hidden_at: int,
    delta_at: int,
    added_norm: Any,
    factor: Any,
    norm: Any,
    width: int,
    out_at: int,
    rows: int,
) -> None:
    """Add the norms of `delta`, times a factor, to `hidden` in place and write the norms of the sums to `out`.

    Shape: hidden, delta, out [rows, width]; `delta` is overwritten; the norms are `NORM`. A `delta_at` of 0 adds
    nothing. Without a norm, rows are used unchanged.
    """
    arguments = hidden_at, delta_at, added_norm, factor, norm, width, out_at
    spread(pool, rows, rows_together(width), _add_normed_row, arguments)


@compiled()
def _norm_part(row: int, rows_at: int, row_bytes: int, width: int, norm: Any) -> None:
    part = bf16_array(rows_at + row * row_bytes, width)
    _any_norm_row(part, norm[0], part)


@kernel(*[LONG] * 4, _NORMS, LONG)
def norm_parts(pool: int, rows_at: int, row_bytes: int, width: int, norm: Any, rows: int) -> None:
    """Replace the first `width` values of each row by their norm; rows are `row_bytes` apart."""
    arguments = rows_at, row_bytes, width, norm
    spread(pool, rows, rows_together(width), _norm_part, arguments)


def norm_of(weight_at: int, eps: float, *, once: bool, bias_at: int = 0) -> npt.NDArray[Any]:
    """Return the record of a norm; its weights must outlive it."""
    return np.array([(weight_at, eps, int(once), bias_at)], dtype=NORM)
