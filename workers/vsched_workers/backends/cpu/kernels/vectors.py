"""What kernels are made of that multiply with the processor's own instruction for pairs of bfloat16.

numba knows neither the instruction nor vectors, so the inner loops of such kernels are written for LLVM.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir  # type: ignore[import-untyped]

LANES = 16
"""float32 values of a vector; of bfloat16 it has twice as many, which are multiplied as pairs."""
LINE = 64
"""Bytes of a vector, and of a line of the cache."""


PAIR: npt.NDArray[Any] = np.zeros(1, dtype=np.uint16)
SINGLE: npt.NDArray[Any] = np.zeros(1, dtype=np.float32)
"""What kernels are given to tell them the type of their operands: bfloat16, which numpy does not know, or float32."""


class _BrainFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat16, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BrainFloat)

    def __hash__(self) -> int:
        return hash(_BrainFloat)


BYTE, WORD, LONG = (ir.IntType(bits) for bits in (8, 32, 64))
SINGLES = ir.VectorType(ir.FloatType(), LANES)
HALVES = ir.VectorType(_BrainFloat(), LANES)
PAIRS = ir.VectorType(_BrainFloat(), 2 * LANES)
WORDS = ir.VectorType(WORD, LANES)
NOTHING = ir.Constant(SINGLES, None)


@functools.cache
def can_multiply() -> bool:
    """Return whether this processor has the instruction, and numba compiles for this processor."""
    limits: Any = numba.config
    chosen = limits.CPU_NAME or limits.CPU_FEATURES
    return not chosen and bool(binding.get_host_cpu_features().get("avx512bf16"))


@functools.cache
def multiplies_tiles() -> bool:
    """Return whether this processor multiplies whole tiles of bfloat16 (AMX), many times as fast as pairs."""
    return bool(binding.get_host_cpu_features().get("amx-bf16"))


class Writer:
    """Writes instructions where its builder is. Addresses are whole numbers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def moved(self, at: Any, count: Any, size: int, offset: int = 0) -> Any:
        """Return an address that lies `count` times `size` bytes, and some, further."""
        further = self.builder.mul(count, ir.Constant(LONG, size))
        return self.builder.add(self.builder.add(at, further), ir.Constant(LONG, offset))

    def load(self, at: Any, kind: Any, align: int = 2) -> Any:
        """Return what lies at an address."""
        return self.builder.load(self.builder.inttoptr(at, kind.as_pointer()), align=align)

    def store(self, value: Any, at: Any, align: int = 2) -> None:
        """Write a value to an address."""
        pointer = value.type.as_pointer()
        self.builder.store(value, self.builder.inttoptr(at, pointer), align=align)

    def multiply(self, total: Any, first: Any, second: Any) -> Any:
        """Return the sums, to each of which the products of its pair are added."""
        declared = ir.FunctionType(SINGLES, [SINGLES, PAIRS, PAIRS])
        name, module = "llvm.x86.avx512bf16.dpbf16ps.512", self.builder.module
        function = module.globals.get(name) or ir.Function(module, declared, name)
        return self.builder.call(function, [total, first, second])

    def repeated(self, value: Any) -> Any:
        """Return a vector of the same value everywhere."""
        kind = ir.VectorType(value.type, LANES)
        nothing = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(WORD, 0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(WORDS, None))

    def fetch(self, at: Any) -> None:
        """Have a line of memory brought into the second cache."""
        pointer = BYTE.as_pointer()
        declared = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [pointer], declared)
        options = [ir.Constant(WORD, value) for value in (0, 2, 1)]
        self.builder.call(function, [self.builder.inttoptr(at, pointer), *options])


class Loop:
    """A loop that runs at least once, and the vectors that it carries from one turn to the next."""

    def __init__(self, builder: Any, carried: Sequence[Any]) -> None:
        """Begin it; `carried` are the vectors that the first turn starts with."""
        self._builder, before = builder, builder.block
        self._body = builder.append_basic_block("turn")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(LONG)
        self.index.add_incoming(ir.Constant(LONG, 0), before)
        self.carried = [builder.phi(each.type) for each in carried]
        for phi, first in zip(self.carried, carried, strict=True):
            phi.add_incoming(first, before)

    def end(self, carried: Sequence[Any], turns: Any) -> None:
        """End a turn with the vectors that the next one gets, and go on behind the last turn."""
        builder = self._builder
        following = builder.add(self.index, ir.Constant(LONG, 1))
        self.index.add_incoming(following, builder.block)
        for phi, later in zip(self.carried, carried, strict=True):
            phi.add_incoming(later, builder.block)
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("<", following, turns), self._body, done)
        builder.position_at_end(done)
