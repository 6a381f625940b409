"""Number formats: bfloat16, which numpy lacks, and the exponential function.

A bfloat16 is the upper half of a float32. It is stored as uint16, widened by a shift, and rounded to the nearest,
ties to even:

  widen(b)  = float32 with the bits b << 16; for an int8, its value
  narrow(x) = (bits(x) + 0x7FFF + (bits(x) >> 16 & 1)) >> 16

numba promotes integers of less than 64 bits to 64 bits in every operation, which halves the number of lanes of a
vector or worse. So bit operations are emitted as LLVM IR.

The exponential is a polynomial, which LLVM vectorizes, unlike a call of the C library.
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
"""Dtype tags: the type of this argument selects the compiled variant, bfloat16 or float32 operands."""

LOG2_E = np.float32(1.4426950408889634)
NO_SCORE = np.float32(-1e30)
"""Below all scores; finite, since the compiler may assume the absence of infinities."""
_LN_2 = np.float32(0.6931471805599453)
_EXPONENT_MIN, _EXPONENT_MAX = np.float32(-126.0), np.float32(127.0)

_WORD = ir.IntType(32)


def _narrow(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, _WORD)
    odd = builder.and_(builder.lshr(bits, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 1))
    bits = builder.add(builder.add(bits, ir.Constant(_WORD, 0x7FFF)), odd)
    return builder.trunc(builder.lshr(bits, ir.Constant(_WORD, 16)), ir.IntType(16))


def _widening(_context: Any, kind: Any) -> Any:
    """Type and code of `widen`: float32 of a float32 (itself), a bfloat16 (upper half of the bits) or an int8."""
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
    """Return a float32 unchanged if the first argument is a float, else rounded to bfloat16."""
    return value if isinstance(kind, numba.types.Float) else _narrow(builder, value)


@compiled()
def through_bf16(value: Any) -> Any:
    """Round a float32 to bfloat16 and widen it again, as if it had been stored."""
    return widen(narrow(value))


def _pointing(_context: Any, _address: Any, like: Any) -> Any:
    """Emit the conversion of an address to a pointer to values of the dtype of `like`."""
    pointer = numba.types.CPointer(like.dtype)

    def point(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(pointer))

    return pointer(numba.intp, like), point


_pointer: Any = numba.extending.intrinsic(_pointing)


@compiled()
def array_like(address: int, like: Any) -> Any:
    """View memory at an address as an array with the shape and dtype of another."""
    return numba.carray(_pointer(address, like), like.shape)  # type: ignore[attr-defined]  # it has no stub


@compiled()
def bf16_array(address: int, count: int) -> Any:
    """View `count` bfloat16 values at an address as an array.

    Kernels view each row as an array of its own: with an arbitrary start index numba checks each index for negative
    values, which prevents vectorization.
    """
    return numba.carray(_pointer(address, BF16), count)  # type: ignore[attr-defined]  # it has no stub


@compiled()
def float32_array(address: int, count: int) -> Any:
    """View `count` float32 values at an address as an array."""
    return numba.carray(_pointer(address, FLOAT32), count)  # type: ignore[attr-defined]  # it has no stub


@compiled()
def copy(source_at: int, target_at: int, count: int) -> None:
    """Copy `count` bfloat16 values."""
    source, target = bf16_array(source_at, count), bf16_array(target_at, count)
    for index in range(count):
        target[index] = source[index]


@emits(numba.int16, numba.uint16)
def ordered(builder: Any, value: Any) -> Any:
    """Integer that orders as the bfloat16 does: for negative values all bits except the sign are flipped."""
    half = ir.IntType(16)
    sign = builder.ashr(value, ir.Constant(half, 15))
    return builder.xor(value, builder.and_(sign, ir.Constant(half, 0x7FFF)))


@emits(numba.float32, numba.float32, numba.float32)
def maximum(builder: Any, one: Any, other: Any) -> Any:
    """Maximum of two float32. numba's own `max` handles NaN, one value at a time."""
    single = ir.FloatType()
    declared = ir.FunctionType(single, [single, single])
    function = builder.module.declare_intrinsic("llvm.maxnum", [single], declared)
    return builder.call(function, [one, other], fastmath=("fast",))


@emits(numba.float32, numba.float32)
def power_of_two(builder: Any, whole: Any) -> Any:
    """2**n for an integral float32 n, by its exponent bits."""
    exponent = builder.add(builder.fptosi(whole, _WORD), ir.Constant(_WORD, 127))
    return builder.bitcast(builder.shl(exponent, ir.Constant(_WORD, 23)), ir.FloatType())


@compiled()
def _taylor(series: Any, rest: Any) -> Any:
    """Taylor series of exp(rest) by Horner's rule, from the term of the fifth power down to the constant."""
    series = series * rest + np.float32(1 / 120)
    series = series * rest + np.float32(1 / 24)
    series = series * rest + np.float32(1 / 6)
    series = series * rest + np.float32(0.5)
    series = series * rest + np.float32(1.0)
    return series * rest + np.float32(1.0)


@compiled()
def exp2(value: Any) -> Any:
    """2**x for x <= 0 as 2**n * e**(f ln 2), n integer, |f| <= 1/2, by the series to its sixth power."""
    power = maximum(value, _EXPONENT_MIN)
    whole = np.floor(power + np.float32(0.5))
    rest = (power - whole) * _LN_2
    return _taylor(np.float32(1 / 720), rest) * power_of_two(whole)


@compiled()
def exp(value: Any) -> Any:
    """e**x as 2**n * e**(f ln 2), n integer, 0 <= f < 1, by the series to its seventh power."""
    power = min(max(value * LOG2_E, _EXPONENT_MIN), _EXPONENT_MAX)
    whole = np.floor(power)
    rest = (power - whole) * _LN_2
    series = np.float32(1 / 5040) * rest + np.float32(1 / 720)
    return _taylor(series, rest) * power_of_two(whole)


@compiled()
def sink_of(sinks_at: int, head: int, factor: Any) -> Any:
    """Attention sink of a head, as a score whose exponent to the base 2 is `factor` times itself.

    Without sinks (address 0) it is so low that its weight, 2**-126, changes no sum of weights.
    """
    if not sinks_at:
        return NO_SCORE
    return float32_array(sinks_at, head + 1)[head] * (LOG2_E / factor)


@compiled()
def soft_cap(scores: Any, count: int, factor: Any, softcap: Any) -> None:
    """Soft-cap: replace scores s by c tanh(factor s / c)."""
    doubled = np.float32(2.0) * factor / softcap
    for index in range(count):
        share = np.float32(2.0) / (np.float32(1.0) + exp(doubled * widen(scores[index])))
        scores[index] = as_type_of(scores[0], softcap - softcap * share)
