"""What the kernels for the CPU are made of: how they are compiled and cached, and what numba itself does not offer.

bfloat16 has no type in numpy; its values arrive as uint16 and are widened by a shift, which is what they are: the upper
half of a float32.

The exponential is a polynomial: the compiler vectorises it, and does not vectorise a call of the C library.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

LN_2 = np.float32(0.6931471805599453)
LOWEST_POWER = np.float32(-126.0)


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Compile with a cache on disk where there is a place for one.

    The error model is numpy's: a division that may raise is not vectorised.
    """
    _keep_cache_by_content()
    options |= {"fastmath": True, "nogil": True, "error_model": "numpy"}

    def compile_function(function: Any) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            return numba.njit(**options)(function)

    return compile_function


@functools.cache
def _keep_cache_by_content() -> None:
    """Have numba keep what it compiles in a folder that is named by the content of all kernels.

    By itself it compiles a function anew when the function's own file has changed, and not when that of a function has
    which is compiled into it. Where the folder cannot be made, or somebody has named one, that stays so.
    """
    here = Path(__file__).parent
    files = sorted([*here.glob("*_kernels.py"), *here.glob("numba_*.py")])
    content = hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=6)
    folder = here / "__pycache__" / f"numba-{content.hexdigest()}"
    limits: Any = numba.config
    if not limits.CACHE_DIR:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            limits.CACHE_DIR = str(folder)


def _widening(_context: Any, value: Any) -> Any:
    """Read a cached value as float32: itself, or the upper half of its bits where the cache is bfloat16."""
    if isinstance(value, numba.types.Float):
        return numba.float32(value), lambda _context, _builder, _signature, arguments: arguments[0]

    def widen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        shifted = builder.shl(builder.zext(arguments[0], word), ir.Constant(word, 16))
        return builder.bitcast(shifted, ir.FloatType())

    return numba.float32(value), widen


as_float: Any = numba.extending.intrinsic(_widening)


def rounded_bits(builder: Any, value: Any) -> Any:
    """Write the rounding of a float32 where the builder is; returns the bits of a bfloat16."""
    word = ir.IntType(32)
    bits = builder.bitcast(value, word)
    odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
    bits = builder.add(builder.add(bits, ir.Constant(word, 0x7FFF)), odd)
    return builder.trunc(builder.lshr(bits, ir.Constant(word, 16)), ir.IntType(16))


def _narrowing(_context: Any, kind: Any, _value: Any) -> Any:
    """Return a float32 as it is, or rounded to bfloat16, whichever `kind` is a value of."""
    if isinstance(kind, numba.types.Float):
        return kind(kind, numba.float32), lambda _context, _builder, _signature, given: given[1]
    return kind(kind, numba.float32), lambda _context, builder, _signature, given: rounded_bits(
        builder, given[1]
    )


as_kind: Any = numba.extending.intrinsic(_narrowing)


def _raising(_context: Any, _value: Any) -> Any:
    """Return two to the power of a whole float32, by writing the bits of its exponent."""

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        exponent = builder.add(builder.fptosi(arguments[0], word), ir.Constant(word, 127))
        return builder.bitcast(builder.shl(exponent, ir.Constant(word, 23)), ir.FloatType())

    return numba.float32(numba.float32), make


def _choosing(_context: Any, _one: Any, _other: Any) -> Any:
    """Return the larger of two float32: numba's own `max` looks for what is no number, one value at a time."""

    def choose(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        single = ir.FloatType()
        declared = ir.FunctionType(single, [single, single])
        function = builder.module.declare_intrinsic("llvm.maxnum", [single], declared)
        return builder.call(function, arguments, fastmath=("fast",))

    return numba.float32(numba.float32, numba.float32), choose


power_of_two: Any = numba.extending.intrinsic(_raising)
larger: Any = numba.extending.intrinsic(_choosing)


@compiled()
def continued(series: Any, rest: Any) -> Any:
    """Go on with the series of exp(rest) from the term of its sixth power to the end."""
    series = series * rest + np.float32(1 / 120)
    series = series * rest + np.float32(1 / 24)
    series = series * rest + np.float32(1 / 6)
    series = series * rest + np.float32(0.5)
    series = series * rest + np.float32(1.0)
    return series * rest + np.float32(1.0)


@compiled()
def exp2(value: Any) -> Any:
    """2**x of x <= 0: 2**n, n whole, times the series of the rest, which lies within a half of zero."""
    power = larger(value, LOWEST_POWER)
    whole = np.floor(power + np.float32(0.5))
    rest = (power - whole) * LN_2
    return continued(np.float32(1 / 720), rest) * power_of_two(whole)


def _prefetching(_context: Any, _address: Any) -> Any:
    """Fetch the line of memory at an address ahead of its use."""

    def fetch(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer, word = ir.PointerType(ir.IntType(8)), ir.IntType(32)
        declared = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], declared)
        options = [ir.Constant(word, 0), ir.Constant(word, 3), ir.Constant(word, 1)]
        builder.call(function, [builder.inttoptr(arguments[0], pointer), *options])
        return None

    return numba.void(numba.intp), fetch


prefetch: Any = numba.extending.intrinsic(_prefetching)
