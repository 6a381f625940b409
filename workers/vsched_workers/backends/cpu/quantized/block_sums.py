"""Integer dot products of a block of inputs, emitted as LLVM IR for the available instructions.

A dtype tag selects the instructions; all have the same results.

- `VNNI` (VPDPBUSD): adds four products of an unsigned and a signed byte to each 32-bit accumulator. int8 weights
  become unsigned by adding 128, fp4 by adding 12; this is corrected with the sum of the row's block.
- `PAIRS` (AVX2 or AVX-512 without VNNI): for int4, VPMADDUBSW adds two products to 16 bits, which hold the sum of a
  block: 8 x 2 x 15 x 127 < 2^15. Of fp4 they hold the sum of two words (2 x 2 x 24 x 127), and VPMADDWD adds each two
  such sums to 32 bits. For int8, the absolute values of weights are multiplied by inputs that take over the weights'
  signs; 16 bits hold only 2 x 128 x 127.
- `PLAIN`: the same as VPDPBUSD, in generic IR for any processor.

  one 32-bit lane of VPDPBUSD:

  weights (unsigned)   | w0 | w1 | w2 | w3 |       one output, four neighbouring inputs
  inputs (signed)      | n0 | n1 | n2 | n3 |       one row, broadcast to all lanes
  sum                  sum + w0 n0 + w1 n1 + w2 n2 + w3 n3

Source: Intel 64 and IA-32 Architectures Software Developer's Manual.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.simd import (
    BYTE,
    LINE,
    WORD,
    InstructionWriter,
    call_llvm,
    splat,
)
from vsched_workers.backends.cpu.quantized.kernel import (
    FOUR_BIT_TAGS,
    FP4_NUMBERS,
    PANEL,
    ZERO_POINTS,
    decode_fp4,
)

VECTORS = 4
"""Vectors of a panel, each the length of a register."""
OUTPUTS = PANEL // VECTORS
"""Outputs of a vector: 32-bit accumulators."""
ROW_BLOCK = 32
"""Inputs of a row that share a scale."""

VNNI: npt.NDArray[Any] = np.zeros(1, dtype=np.int8)
PAIRS: npt.NDArray[Any] = np.zeros(1, dtype=np.int16)
PLAIN: npt.NDArray[Any] = np.zeros(1, dtype=np.int32)
"""Dtype tags of instructions."""

FLOATS = ir.VectorType(ir.FloatType(), OUTPUTS)
SUMS = ir.VectorType(WORD, OUTPUTS)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * OUTPUTS)
_BYTES = ir.VectorType(BYTE, 4 * OUTPUTS)
_BITS = 32 * OUTPUTS


@functools.cache
def instructions() -> npt.NDArray[Any]:
    """Return the tag of this processor's best instructions, if numba compiles for this processor."""
    config: Any = numba.config
    if config.CPU_NAME or config.CPU_FEATURES:
        return PLAIN
    features = binding.get_host_cpu_features()
    wide = OUTPUTS == 16
    if features.get("avx512vnni" if wide else "avxvnni"):
        return VNNI
    return PAIRS if features.get("avx512bw" if wide else "avx2") else PLAIN


class BlockSums:
    """Emits the integer dot products of a block, for some rows and some vectors of a panel."""

    def __init__(self, builder: Any, kind: Any, tag: Any) -> None:
        self._builder, self._writer = builder, InstructionWriter(builder)
        self._is_int4, self._zero_point = kind is numba.types.uint8, ZERO_POINTS[kind]
        self._words = 2 if kind in FOUR_BIT_TAGS else 1
        self._pairs = tag is numba.types.int16
        self._native = tag is numba.types.int8

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights of a panel's block."""
        return ROW_BLOCK * PANEL // self._words

    @property
    def has_correction(self) -> bool:
        """Whether the accumulators need a zero-point correction."""
        return self._words == 2 or not self._pairs

    def sums(
        self,
        weight_at: Any,
        vectors: Sequence[int],
        rows_at: Sequence[Any],
        first: Sequence[Any],
        ahead_at: Any = None,
    ) -> list[Any]:
        """Emit the 32-bit accumulators of each row's vectors, row by row.

        `first` are the initial values of each row, or None. The same number of bytes is prefetched from `ahead_at`
        on.
        """
        short, words = self._pairs and self._is_int4, self._words
        found: list[Any] = [None if short else each for each in first for _ in vectors]
        for step in range(ROW_BLOCK // (4 * words)):
            places = [4 * (step * PANEL + OUTPUTS * each) for each in vectors]
            for place in places if ahead_at is not None else ():
                if place % LINE == 0:
                    at = self._writer.offset(ahead_at, place)
                    self._writer.prefetch(at, locality=2)
            weights = [self._operands(self._load(weight_at, place, _BYTES)) for place in places]
            for row, at in enumerate(rows_at):
                inputs = [self._row(at, 4 * (words * step + each)) for each in range(words)]
                for place, operands in enumerate(weights, row * len(vectors)):
                    found[place] = self._add(found[place], operands, inputs)
        if not short:
            return found
        starts = [each for each in first for _ in vectors]
        longs = [self._of_shorts(each) for each in found]
        return [self._builder.add(*each) for each in zip(longs, starts, strict=True)]

    def _operands(self, loaded: Any) -> tuple[Any, ...]:
        """Split a vector of weights into operands: low and high nibbles of 4 bits, otherwise all.

        Each operand is a pair of unsigned weights and their original signed values, or None if the sign is not
        needed.
        """
        builder = self._builder
        if self._words == 2:
            four, mask = splat(_SHORTS, 4), splat(_BYTES, 15)
            shifted = builder.lshr(builder.bitcast(loaded, _SHORTS), four)
            upper = builder.and_(builder.bitcast(shifted, _BYTES), mask)
            both = builder.and_(loaded, mask), upper
            return tuple((each if self._is_int4 else self._fp4(each), None) for each in both)
        if self._pairs:
            whole = ir.Constant(ir.IntType(1), 0)
            name = f"llvm.abs.v{_BYTES.count}i8"
            return ((call_llvm(builder, name, _BYTES, loaded, whole), loaded),)
        return ((builder.xor(loaded, splat(_BYTES, 0x80)), None),)

    def _row(self, at: Any, place: int) -> Any:
        """Emit four inputs of a row in every lane."""
        word = self._load(at, place, WORD)
        return self._builder.bitcast(self._writer.broadcast(word, OUTPUTS), _BYTES)

    def _fp4(self, codes: Any) -> Any:
        """Emit the numbers of e2m1 codes plus the zero point."""
        if not self._native and not self._pairs:
            number = decode_fp4(self._builder, codes)
            return self._builder.add(number, splat(_BYTES, self._zero_point))
        name = "avx2.pshuf.b" if _BITS == 256 else "avx512.pshuf.b.512"
        numbers = [each + self._zero_point for each in FP4_NUMBERS]
        table = ir.Constant(_BYTES, numbers * (_BYTES.count // len(numbers)))
        return call_llvm(self._builder, f"llvm.x86.{name}", _BYTES, table, codes)

    def _add(self, total: Any, operands: Sequence[tuple[Any, Any]], inputs: Sequence[Any]) -> Any:
        """Emit the addition of the products of all operands to a total; a total of None is zero."""
        builder, both = self._builder, zip(operands, inputs, strict=True)
        if not self._pairs:
            for (weights, _), each in both:
                total = self._add_products(total, weights, each)
            return total
        added = [self._pair_products(*operand, each) for operand, each in both]
        if not self._is_int4:
            added = [self._of_shorts(functools.reduce(builder.add, added))]
        for each in added:
            total = each if total is None else builder.add(total, each)
        return total

    def _pair_products(self, weights: Any, signs: Any, inputs: Any) -> Any:
        """Emit the 16-bit sums of two products each."""
        name = "avx2.pmadd.ub.sw" if _BITS == 256 else "avx512.pmaddubs.w.512"
        inputs = inputs if signs is None else self._signed(inputs, signs)
        return call_llvm(self._builder, f"llvm.x86.{name}", _SHORTS, weights, inputs)

    def _add_products(self, total: Any, weights: Any, inputs: Any) -> Any:
        builder = self._builder
        total = splat(SUMS, 0) if total is None else total
        if self._native:
            name = f"llvm.x86.avx512.vpdpbusd.{_BITS}"
            return call_llvm(builder, name, SUMS, total, weights, inputs)
        for place in range(4):
            weight, value = (builder.bitcast(each, SUMS) for each in (weights, inputs))
            weight = builder.and_(builder.lshr(weight, splat(SUMS, 8 * place)), splat(SUMS, 255))
            value = builder.shl(value, splat(SUMS, 24 - 8 * place))
            value = builder.ashr(value, splat(SUMS, 24))
            total = builder.add(total, builder.mul(weight, value))
        return total

    def _signed(self, inputs: Any, signs: Any) -> Any:
        """Negate the inputs that belong to negative weights."""
        builder, none = self._builder, splat(_BYTES, 0)
        if _BITS == 256:
            return call_llvm(builder, "llvm.x86.avx2.psign.b", _BYTES, inputs, signs)
        negative = builder.icmp_signed("<", signs, none)
        return builder.select(negative, builder.sub(none, inputs), inputs)

    def _of_shorts(self, shorts: Any) -> Any:
        """Add pairs of 16-bit sums to 32-bit sums."""
        name = "avx2.pmadd.wd" if _BITS == 256 else "avx512.pmaddw.d.512"
        return call_llvm(self._builder, f"llvm.x86.{name}", SUMS, shorts, splat(_SHORTS, 1))

    def _load(self, at: Any, place: int, kind: Any) -> Any:
        return self._writer.load(self._writer.offset(at, place), kind, 1)
