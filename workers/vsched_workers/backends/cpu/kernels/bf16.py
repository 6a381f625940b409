"""Numbers: bfloat16, which numpy does not know, and the exponential.

A bfloat16 is the upper half of a float32. It travels as uint16, is widened by a shift, and rounded to the nearest, ties
to even:

    widen(b)  = float32 with the bits  b << 16; of a whole number of 8 bits, that number
    narrow(x) = (bits(x) + 0x7FFF + (bits(x) >> 16 & 1)) >> 16

numba widens whole numbers of less than 64 bits as soon as anything is done with them, which takes half the lanes of a
vector or more. So what works on bits is written for LLVM.

The exponential is a polynomial: LLVM vectorises it, and does not vectorise a call of the C library.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.compilation import compiled, emits

BF16: npt.NDArray[Any] = np.zeros(1, dtype=np.uint16)
FLOAT32: npt.NDArray[Any] = np.zeros(1, dtype=np.float32)
"""Dtype tags: an argument by whose type a kernel is compiled for bfloat16 or for float32 operands."""

LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)
_EXPONENT_MIN, _EXPONENT_MAX = np.float32(-126.0), np.float32(127.0)

_WORD = ir.IntType(32)


def _narrow(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, _WORD)
    odd = builder.and_(builder.lshr(bits, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 1))
    bits = builder.add(builder.add(bits, ir.Constant(_WORD, 0x7FFF)), odd)
    return builder.trunc(builder.lshr(bits, ir.Constant(_WORD, 16)), ir.IntType(16))


def _widening(_context: Any, kind: Any) -> Any:
    """Return float32: the value itself, of a bfloat16 the upper half of its bits, or a whole number of 8 bits."""
    if isinstance(kind, numba.types.Float):
        return numba.float32(kind), lambda _context, _builder, _signature, values: values[0]
    if kind == numba.int8:

        def convert(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return builder.sitofp(values[0], ir.FloatType())

        return numba.float32(kind), convert

    def widen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        shifted = builder.shl(builder.zext(values[0], _WORD), ir.Constant(_WORD, 16))
        return builder.bitcast(shifted, ir.FloatType())

    return numba.float32(kind), widen


widen: Any = numba.extending.intrinsic(_widening)


@emits(numba.uint16, numba.float32)
def narrow(builder: Any, value: Any) -> Any:
    """Round a float32 to bfloat16."""
    return _narrow(builder, value)


@emits(None, None, numba.float32)
def as_type_of(builder: Any, kind: Any, value: Any) -> Any:
    """Return a float32 as it is where the first argument is one, or else rounded to bfloat16."""
    return value if isinstance(kind, numba.types.Float) else _narrow(builder, value)


@compiled()
def through_bf16(value: Any) -> Any:
    """Return widen(narrow(value)): a float32 that has been stored as bfloat16."""
    return widen(narrow(value))


_POINTER = numba.types.CPointer(numba.uint16)


def _pointing(_context: Any, _address: Any) -> Any:
    """Take an address for that of bfloat16 values."""

    def point(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(_POINTER))

    return _POINTER(numba.intp), point


_pointer: Any = numba.extending.intrinsic(_pointing)


@compiled()
def bf16_array(address: int, count: int) -> Any:
    """Return the `count` bfloat16 values at an address as an array.

    A row has its own array: an index that starts anywhere might be negative, and is looked at one by one.
    """
    return numba.carray(_pointer(address), count)  # type: ignore[attr-defined]  # it has no stub


_SINGLES = numba.types.CPointer(numba.float32)


def _pointing_to_singles(_context: Any, _address: Any) -> Any:
    """Take an address for that of float32 values."""

    def point(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(_SINGLES))

    return _SINGLES(numba.intp), point


_single_pointer: Any = numba.extending.intrinsic(_pointing_to_singles)


@compiled()
def float32_array(address: int, count: int) -> Any:
    """Return the `count` float32 values at an address as an array."""
    return numba.carray(_single_pointer(address), count)  # type: ignore[attr-defined]  # it has no stub


@compiled()
def copy(source_at: int, target_at: int, count: int) -> None:
    """Copy `count` bfloat16 values."""
    source, target = bf16_array(source_at, count), bf16_array(target_at, count)
    for index in range(count):
        target[index] = source[index]


@emits(numba.int16, numba.uint16)
def ordered(builder: Any, value: Any) -> Any:
    """Return a whole number that compares as a bfloat16 does: of a negative one, the lower bits are flipped."""
    half = ir.IntType(16)
    sign = builder.ashr(value, ir.Constant(half, 15))
    return builder.xor(value, builder.and_(sign, ir.Constant(half, 0x7FFF)))


@emits(numba.float32, numba.float32, numba.float32)
def larger(builder: Any, one: Any, other: Any) -> Any:
    """Return the larger of two float32: numba's own `max` checks for NaN, one value at a time."""
    single = ir.FloatType()
    declared = ir.FunctionType(single, [single, single])
    function = builder.module.declare_intrinsic("llvm.maxnum", [single], declared)
    return builder.call(function, [one, other], fastmath=("fast",))


@emits(numba.float32, numba.float32)
def power_of_two(builder: Any, whole: Any) -> Any:
    """Return 2**n of a whole float32 n, by writing the bits of its exponent."""
    exponent = builder.add(builder.fptosi(whole, _WORD), ir.Constant(_WORD, 127))
    return builder.bitcast(builder.shl(exponent, ir.Constant(_WORD, 23)), ir.FloatType())


@compiled()
def _taylor(series: Any, rest: Any) -> Any:
    """Go on with the Taylor series of exp(rest), by Horner's rule, from the term of its fifth power to the end."""
    series = series * rest + np.float32(1 / 120)
    series = series * rest + np.float32(1 / 24)
    series = series * rest + np.float32(1 / 6)
    series = series * rest + np.float32(0.5)
    series = series * rest + np.float32(1.0)
    return series * rest + np.float32(1.0)


@compiled()
def exp2(value: Any) -> Any:
    """Return 2**x of x <= 0 as 2**n * e**(f ln 2), n whole, |f| <= 1/2, by the series to its sixth power."""
    power = larger(value, _EXPONENT_MIN)
    whole = np.floor(power + np.float32(0.5))
    rest = (power - whole) * _LN_2
    return _taylor(np.float32(1 / 720), rest) * power_of_two(whole)


@compiled()
def exp(value: Any) -> Any:
    """Return e**x as 2**n * e**(f ln 2), n whole, 0 <= f < 1, by the series to its seventh power."""
    power = min(max(value * LOG2_E, _EXPONENT_MIN), _EXPONENT_MAX)
    whole = np.floor(power)
    rest = (power - whole) * _LN_2
    series = np.float32(1 / 5040) * rest + np.float32(1 / 720)
    return _taylor(series, rest) * power_of_two(whole)
