"""What lies between the matrix products of a layer, each as one pass over the memory: kernels for bfloat16 on the CPU.

torch offers these as some thirty calls a layer, each of which reads and writes all rows and costs a few microseconds
before it does anything. Here they are a few: what a layer adds and its norm, the activation, and, in
`kernels/heads.py`, all about heads.

Every number is rounded to bfloat16 where transformers' modules round it, so that the results are the same but for the
order of sums. numpy has no bfloat16: it arrives as uint16 (see `numba_basics.py`). What torch has just made arrives
as an address: a view as an array would cost more than most kernels do.

Each kernel runs over a range of rows, on one thread or on all: waking threads takes longer than a few rows do.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.numba_basics import (
    LN_2,
    LOWEST_POWER,
    as_float,
    compiled,
    continued,
    power_of_two,
    rounded_bits,
)

_LOG2_E = np.float32(1.4426950408889634)
_SILENT = np.float32(-87.0)
"""Below it silu is less than 1e-35, and its exponential more than a float32 holds."""
_HIGHEST = np.float32(127.0)


# Whole numbers of less than 64 bits become such in numba as soon as anything is done with them, which takes half the
# lanes of a vector or more. So what works on bits is written for the compiler below it.


def _halves_at(_context: Any, _address: Any) -> Any:
    """Take an address for that of bfloat16 values."""
    pointer = numba.types.CPointer(numba.uint16)

    def point(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(numba.intp), point


def _rounding(_context: Any, _value: Any) -> Any:
    """Return the bfloat16 next to a float32; of two as near, the even one."""

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return rounded_bits(builder, arguments[0])

    return numba.uint16(numba.float32), make


def _ordering(_context: Any, _value: Any) -> Any:
    """Return a whole number that compares as a bfloat16 does: of a negative one, the lower bits flipped."""

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        half = ir.IntType(16)
        sign = builder.ashr(arguments[0], ir.Constant(half, 15))
        return builder.xor(arguments[0], builder.and_(sign, ir.Constant(half, 0x7FFF)))

    return numba.int16(numba.uint16), make


_pointer: Any = numba.extending.intrinsic(_halves_at)
rounded: Any = numba.extending.intrinsic(_rounding)
_ordered: Any = numba.extending.intrinsic(_ordering)


@compiled()
def through(value: Any) -> Any:
    """Return a float32 that has been stored as bfloat16."""
    return as_float(rounded(value))


@compiled()
def _exp(value: Any) -> Any:
    """exp(x) = 2**n * 2**f with n whole and 0 <= f < 1; 2**f by its series."""
    power = min(max(value * _LOG2_E, LOWEST_POWER), _HIGHEST)
    whole = np.floor(power)
    rest = (power - whole) * LN_2
    series = np.float32(1 / 5040) * rest + np.float32(1 / 720)
    return continued(series, rest) * power_of_two(whole)


@compiled()
def halves(address: int, count: int) -> Any:
    """Return so many bfloat16 values at an address.

    A row has its own array: an index that starts anywhere might be negative, and is looked at one by one.
    """
    return numba.carray(_pointer(address), count)  # type: ignore[attr-defined]  # it has no stub


# --- residual and norm ---


@compiled()
def _norm_row(hidden: Any, weight: Any, total: Any, eps: Any, out: Any) -> None:
    """Write the norm of a row, the sum of whose squares is `total`."""
    scale = np.float32(1.0) / np.sqrt(total / np.float32(len(weight)) + eps)
    for index in range(len(weight)):
        value = through(as_float(hidden[index]) * scale)
        out[index] = rounded(as_float(weight[index]) * value)


@compiled()
def _add_norm_row(
    hidden_at: int, delta_at: int, weight_at: int, width: int, eps: Any, out_at: int, row: int
) -> None:
    hidden = halves(hidden_at + 2 * row * width, width)
    total = np.float32(0.0)
    if delta_at:
        delta = halves(delta_at + 2 * row * width, width)
        for index in range(width):
            half = rounded(as_float(hidden[index]) + as_float(delta[index]))
            hidden[index] = half
            total += as_float(half) * as_float(half)
    else:
        for index in range(width):
            total += as_float(hidden[index]) * as_float(hidden[index])
    _norm_row(hidden, halves(weight_at, width), total, eps, halves(out_at + 2 * row * width, width))


@compiled()
def add_norm(
    hidden_at: int, delta_at: int, weight_at: int, width: int, eps: Any, out_at: int, rows: int
) -> None:
    """Write the norms of rows; what lies at `delta_at`, where that is not 0, is added to the rows before."""
    for row in range(rows):
        _add_norm_row(hidden_at, delta_at, weight_at, width, eps, out_at, row)


@compiled(parallel=True)
def add_norm_parallel(
    hidden_at: int, delta_at: int, weight_at: int, width: int, eps: Any, out_at: int, rows: int
) -> None:
    """As `add_norm`, on all threads."""
    for row in numba.prange(rows):
        _add_norm_row(hidden_at, delta_at, weight_at, width, eps, out_at, row)


# --- activation ---


@compiled()
def _activate_row(gate_at: int, up_at: int, width: int) -> None:
    gate, up = halves(gate_at, width), halves(up_at, width)
    for index in range(width):
        value = as_float(gate[index])
        active = value / (np.float32(1.0) + _exp(-value))
        active = through(active if value > _SILENT else np.float32(0.0))
        gate[index] = rounded(active * as_float(up[index]))


@compiled()
def activate(gate_at: int, up_at: int, rows: int, width: int) -> None:
    """Replace rows of the gate by silu(gate) * up."""
    _activate_row(gate_at, up_at, rows * width)


@compiled(parallel=True)
def activate_parallel(gate_at: int, up_at: int, rows: int, width: int) -> None:
    """As `activate`, on all threads."""
    for row in numba.prange(rows):
        _activate_row(gate_at + 2 * row * width, up_at + 2 * row * width, width)


# --- greedy sampling ---


@compiled()
def argmax(logits_at: int, rows: int, width: int, out: Any) -> None:
    """Write the place of the largest bfloat16 of every row, the first of equal ones."""
    for row in range(rows):
        values = halves(logits_at + 2 * row * width, width)
        highest = _ordered(values[0])
        for index in range(width):
            highest = max(highest, _ordered(values[index]))
        place = 0
        while _ordered(values[place]) != highest:
            place += 1
        out[row] = place


def warm_up(*, threads: int) -> None:
    """Compile now, so that the first request does not wait for it."""
    eps = np.float32(1.0)
    for norm in (add_norm, add_norm_parallel)[: 1 + (threads > 1)]:
        norm(0, 0, 0, 1, eps, 0, 0)
    for active in (activate, activate_parallel)[: 1 + (threads > 1)]:
        active(0, 0, 0, 1)
    argmax(0, 0, 1, np.empty(0, dtype=np.int32))
