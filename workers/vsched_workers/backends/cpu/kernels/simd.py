"""512-bit vectors and the bfloat16 dot product (VDPBF16PS), emitted as LLVM IR.

numba exposes neither vector types nor this instruction, so kernels that need them emit the LLVM IR of their inner
loops with an `InstructionWriter`. VDPBF16PS takes 16 float32 accumulators and two vectors of 32 bfloat16 values:

  sum[i] <- sum[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1],   i = 0 .. 15

Functions decorated with `emits` run at compile time. Their arguments are LLVM values, and Python loops in them unroll
the emitted code: a Python list of 4 values is 4 registers.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, AVX512_BF16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.compilation import emits

LANES = 16
"""float32 values of a vector. A vector of bfloat16 holds twice as many: 16 pairs."""
LINE = 64
"""Bytes of a vector, and of a cache line."""


class _Bf16(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat16 type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bf16)

    def __hash__(self) -> int:
        return hash(_Bf16)


BYTE, WORD, LONG = (ir.IntType(bits) for bits in (8, 32, 64))
FLOATS = ir.VectorType(ir.FloatType(), LANES)
BF16S = ir.VectorType(_Bf16(), LANES)
BF16_PAIRS = ir.VectorType(_Bf16(), 2 * LANES)
WORDS = ir.VectorType(WORD, LANES)
ZEROS = ir.Constant(FLOATS, None)


@functools.cache
def has_bf16_dot() -> bool:
    """Return True if this processor has VDPBF16PS and numba compiles for this processor."""
    return _can_use("avx512bf16")


@functools.cache
def has_permutation() -> bool:
    """Return True if this processor has VPERMPS of 16 lanes and numba compiles for this processor."""
    return _can_use("avx512f")


def _can_use(feature: str) -> bool:
    config: Any = numba.config
    chosen = config.CPU_NAME or config.CPU_FEATURES
    return not chosen and bool(binding.get_host_cpu_features().get(feature))


@functools.cache
def has_avx512() -> bool:
    """Return True if vector registers have 512 bits; otherwise a vector takes two registers."""
    return bool(binding.get_host_cpu_features().get("avx512f"))


@functools.cache
def has_amx() -> bool:
    """Return True if this processor multiplies tiles of bfloat16 (AMX), several times as fast as VDPBF16PS."""
    return bool(binding.get_host_cpu_features().get("amx-bf16"))


def call_llvm(builder: Any, name: str, kind: Any, *given: Any, fastmath: Sequence[str] = ()) -> Any:
    """Emit a call of an LLVM intrinsic."""
    module = builder.module
    declared = ir.FunctionType(kind, [each.type for each in given])
    function = module.globals.get(name) or ir.Function(module, declared, name)
    return builder.call(function, given, fastmath=fastmath)


def splat(kind: Any, value: float) -> Any:
    """Vector of a type with a constant in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def constant(value: float) -> Any:
    """Vector of a float32, rounded from a constant."""
    return splat(FLOATS, float(np.float32(value)))


class InstructionWriter:
    """Emits instructions at the position of its builder. Addresses are integers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def advance(self, at: Any, count: Any, size: int, offset: int = 0) -> Any:
        """Address `at + count * size + offset`."""
        further = self.builder.mul(count, ir.Constant(LONG, size))
        return self.builder.add(self.builder.add(at, further), ir.Constant(LONG, offset))

    def offset(self, at: Any, count: int) -> Any:
        """Address `at + count`."""
        return self.builder.add(at, ir.Constant(LONG, count))

    def load(self, at: Any, kind: Any, align: int = 2) -> Any:
        """Emit the load of a value of a type."""
        return self.builder.load(self.builder.inttoptr(at, kind.as_pointer()), align=align)

    def store(self, value: Any, at: Any, align: int = 2) -> None:
        """Emit the store of a value."""
        pointer = value.type.as_pointer()
        self.builder.store(value, self.builder.inttoptr(at, pointer), align=align)

    def dot(self, total: Any, first: Any, second: Any) -> Any:
        """Emit VDPBF16PS: each lane of `total` plus the dot product of its pairs."""
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return call_llvm(self.builder, name, FLOATS, total, first, second)

    def narrow_both(self, lower: Any, upper: Any) -> Any:
        """Emit the rounding of two float32 vectors into one bfloat16 vector, `lower` first."""
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return call_llvm(self.builder, name, BF16_PAIRS, upper, lower)

    def look_up(self, table: Sequence[float], places: Any) -> Any:
        """Emit VPERMPS: the float32 of a table of 16 at the lowest four bits of each lane."""
        name = "llvm.x86.avx512.permvar.sf.512"
        return call_llvm(
            self.builder, name, FLOATS, ir.Constant(FLOATS, [*map(float, table)]), places
        )

    def multiply_add(self, total: Any, first: Any, second: Any) -> Any:
        """Emit `total + first * second` of float32 vectors, which LLVM contracts to one FMA."""
        product = self.builder.fmul(first, second, flags=("contract",))
        return self.builder.fadd(total, product, flags=("contract",))

    def maximum(self, one: Any, other: Any) -> Any:
        """Emit the elementwise maximum of float32 vectors."""
        return self.builder.select(self.builder.fcmp_ordered(">", one, other), one, other)

    def exp2(self, power: Any, terms: int) -> Any:
        """Emit 2**x = 2**n * e**(f ln 2), n integer, |f| <= 1/2, with `terms` powers of its Taylor series."""
        whole = call_llvm(self.builder, f"llvm.rint.v{LANES}f32", FLOATS, power)
        rest = self.builder.fsub(power, whole)
        series, *lower = [
            constant(math.log(2) ** term / math.factorial(term)) for term in range(terms, -1, -1)
        ]
        for coefficient in lower:
            series = self.multiply_add(coefficient, series, rest)
        all_lanes, usual_rounding = ir.Constant(ir.IntType(LANES), -1), ir.Constant(WORD, 4)
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        return call_llvm(
            self.builder, name, FLOATS, series, whole, ZEROS, all_lanes, usual_rounding
        )

    def broadcast(self, value: Any, lanes: int = LANES) -> Any:
        """Emit a vector with the value in every lane."""
        nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(WORD, 0))
        return self.builder.shuffle_vector(
            first, nothing, ir.Constant(ir.VectorType(WORD, lanes), None)
        )

    def prefetch(self, at: Any, locality: int) -> None:
        """Emit the prefetch of a cache line into L1 (locality 3) or L2 (2)."""
        pointer = BYTE.as_pointer()
        declared = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [pointer], declared)
        options = [ir.Constant(WORD, value) for value in (0, locality, 1)]
        self.builder.call(function, [self.builder.inttoptr(at, pointer), *options])


class Loop:
    """Emits a loop that runs at least once, with vectors carried in registers from one iteration to the next.

    The body is emitted between `__init__` and `end`. `index` counts iterations; `carried` are the phi nodes of the
    accumulators.
    """

    def __init__(self, builder: Any, initial: Sequence[Any]) -> None:
        """Begin the loop; `initial` are the values of the carried vectors in the first iteration."""
        self._builder, before = builder, builder.block
        self._body = builder.append_basic_block("iteration")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(LONG)
        self.index.add_incoming(ir.Constant(LONG, 0), before)
        self.carried = [builder.phi(each.type) for each in initial]
        for phi, first in zip(self.carried, initial, strict=True):
            phi.add_incoming(first, before)

    def end(self, carried: Sequence[Any], iterations: Any) -> None:
        """End the iteration with the carried vectors of the next one; later code is emitted after the loop."""
        builder = self._builder
        following = builder.add(self.index, ir.Constant(LONG, 1))
        self.index.add_incoming(following, builder.block)
        for phi, later in zip(self.carried, carried, strict=True):
            phi.add_incoming(later, builder.block)
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("<", following, iterations), self._body, done)
        builder.position_at_end(done)


def cases(builder: Any, value: Any, counts: Iterable[int]) -> Iterator[int]:
    """Emit a switch: each iteration over this generator emits the case of one value.

    The number of registers of a kernel is fixed at compile time, so each number of rows or vectors is a case. No case
    means no operation.
    """
    end = builder.append_basic_block("end")
    switch = builder.switch(value, end)
    for count in counts:
        block = builder.append_basic_block("case")
        switch.add_case(ir.Constant(LONG, count), block)
        builder.position_at_end(block)
        yield count
        builder.branch(end)
    builder.position_at_end(end)


@emits(numba.void, numba.intp)
def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line at an address into L1."""
    InstructionWriter(builder).prefetch(address, locality=3)
