"""The product of rows and a quantised weight in whole numbers: rows are made into 8 bits first, block by block.

    s[r, b] = max_(i in b) |rows[r, i]| / 127,   n[r, i] = round(rows[r, i] / s[r, b])
    out[r, o] = bias[o] + sum_b s[r, b] * (scale[g, o] * sum_(i in b) n[r, i] * (q[o, i] - centre)
                                           + offset[g, o] * sum_(i in b) n[r, i])

where a block b has `ROW_BLOCK` inputs and lies in one group g of the weight. The sums in a block are exact; blocks are
added up in float32, one by one. Every row has its own scales and sums, so its result has the same bits whatever rows
are beside it: one row of decode, a chunk of prefill, or all rows of an image.

**Layout.** That of `kernel.py`: four neighbouring inputs of an output are four bytes, or of int4 eight inputs, the
first four of which are the lower halves. That is what instructions for sums of bytes take.

**Instructions.** A dtype tag says which; all have the same sums.

- `VNNI` (VPDPBUSD): adds four products of an unsigned and a signed byte to each sum of 32 bits. Weights of 8 bits
  become unsigned by adding 128; what that adds is taken away with the sum of the row's block.
- `PAIRS` (AVX2 or AVX-512 without VNNI): of int4, VPMADDUBSW adds two products to 16 bits, which hold those of a block:
  8 x 2 x 15 x 127 < 2^15. Of int8, the sizes of weights are multiplied by inputs that have taken over their signs, and
  as 2 x 128 x 127 is all that 16 bits hold, VPMADDWD adds up each two such sums to 32 bits.
- `PLAIN`: what VPDPBUSD does, written for any processor.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual; for rows of 8 bits in blocks, the format Q8_0 of
llama.cpp's ggml.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, float32_array
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits, threaded
from vsched_workers.backends.cpu.kernels.simd import (
    BYTE,
    LINE,
    LONG,
    WORD,
    InstructionWriter,
    Loop,
    cases,
)
from vsched_workers.backends.cpu.quantized.kernel import PANEL, write_rows

VECTORS = 4
"""Vectors of a panel, each as long as a register."""
OUTPUTS = PANEL // VECTORS
"""Outputs of a vector: sums of 32 bits."""
ROW_BLOCK = 32
"""Inputs of a row that have one scale."""
PASS_ROWS = 4
"""Most rows of a pass."""
OWN_ROWS_MAX = 8
"""Most rows that every thread makes into 8 bits for itself: to wait for one another would take longer."""
_TOGETHER = {1: 4, 2: 2, 3: 2, 4: 2}
"""Vectors that are multiplied together, by the rows of a pass: as many sums as registers hold."""
_AHEAD = 4096
"""Bytes that weights are fetched ahead of their use."""
_LEAST = 1e-30
"""A block of which no value is larger is one of zeros."""

VNNI: npt.NDArray[Any] = np.zeros(1, dtype=np.int8)
PAIRS: npt.NDArray[Any] = np.zeros(1, dtype=np.int16)
PLAIN: npt.NDArray[Any] = np.zeros(1, dtype=np.int32)
"""Dtype tags of instructions."""

_SINGLE = ir.FloatType()
_FLOATS = ir.VectorType(_SINGLE, OUTPUTS)
_SUMS = ir.VectorType(WORD, OUTPUTS)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * OUTPUTS)
_BYTES = ir.VectorType(BYTE, 4 * OUTPUTS)
_HALVES = ir.VectorType(ir.HalfType(), OUTPUTS)
_BITS = 32 * OUTPUTS


@functools.cache
def instructions() -> npt.NDArray[Any]:
    """Return the tag of the best instructions of this processor, if numba compiles for that."""
    config: Any = numba.config
    if config.CPU_NAME or config.CPU_FEATURES:
        return PLAIN
    features = binding.get_host_cpu_features()
    wide = OUTPUTS == 16
    if features.get("avx512vnni" if wide else "avxvnni"):
        return VNNI
    return PAIRS if features.get("avx512bw" if wide else "avx2") else PLAIN


def _all(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _called(builder: Any, name: str, kind: Any, *given: Any) -> Any:
    """Return the result of one of LLVM's functions."""
    module = builder.module
    declared = ir.FunctionType(kind, [each.type for each in given])
    function = module.globals.get(name) or ir.Function(module, declared, name)
    return builder.call(function, given)


def _spread(builder: Any, value: Any, count: int) -> Any:
    """Return a vector with a value in every lane."""
    nothing = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(WORD, count), None))


class _Dots:
    """Writes the sums of a block: those of some rows and some vectors of a panel."""

    def __init__(self, builder: Any, kind: Any, tag: Any) -> None:
        self._builder, self._writer = builder, InstructionWriter(builder)
        self._four = kind is numba.types.uint8
        self._pairs = tag is numba.types.int16
        self._native = tag is numba.types.int8

    @property
    def weight_bytes(self) -> int:
        """Bytes of a panel's block of weights."""
        return ROW_BLOCK * PANEL // (2 if self._four else 1)

    @property
    def centred(self) -> bool:
        """Whether something has to be taken away from the sums."""
        return self._four or not self._pairs

    def sums(self, weight_at: Any, vectors: Sequence[int], rows_at: Sequence[Any]) -> list[Any]:
        """Return the sums of 32 bits of each row's vectors, one row behind the other."""
        found: list[Any] = [None] * (len(rows_at) * len(vectors))
        words = 2 if self._four else 1
        for step in range(ROW_BLOCK // (4 * words)):
            places = [4 * (step * PANEL + OUTPUTS * each) for each in vectors]
            for place in places:
                if place % LINE == 0:
                    ahead_at = self._builder.add(weight_at, ir.Constant(LONG, _AHEAD + place))
                    self._writer.prefetch(ahead_at, locality=3)
            weights = [self._halves(self._load(weight_at, place, _BYTES)) for place in places]
            for row, at in enumerate(rows_at):
                inputs = [self._row(at, 4 * (words * step + each)) for each in range(words)]
                for place, halves in enumerate(weights, row * len(vectors)):
                    for given, half in zip(inputs, halves, strict=True):
                        found[place] = self._add(found[place], half, given)
        if self._pairs and self._four:
            return [self._of_shorts(each) for each in found]
        return found

    def _halves(self, loaded: Any) -> tuple[Any, ...]:
        """Return what a vector of weights holds, as its sums are added: lower and upper ones, or all.

        Weights without a sign, and where they had one, what it came from.
        """
        builder = self._builder
        if self._four:
            four, mask = _all(_SHORTS, 4), _all(_BYTES, 15)
            shifted = builder.lshr(builder.bitcast(loaded, _SHORTS), four)
            upper = builder.and_(builder.bitcast(shifted, _BYTES), mask)
            return (builder.and_(loaded, mask), None), (upper, None)
        if self._pairs:
            whole = ir.Constant(ir.IntType(1), 0)
            name = f"llvm.abs.v{_BYTES.count}i8"
            return ((_called(builder, name, _BYTES, loaded, whole), loaded),)
        return ((builder.xor(loaded, _all(_BYTES, 0x80)), None),)

    def _row(self, at: Any, place: int) -> Any:
        """Return four inputs of a row, in every lane."""
        word = self._load(at, place, WORD)
        return self._builder.bitcast(_spread(self._builder, word, OUTPUTS), _BYTES)

    def _add(self, total: Any, half: tuple[Any, Any], inputs: Any) -> Any:
        """Return a total to which products are added; None is the total of nothing."""
        builder, (weights, signs) = self._builder, half
        if self._pairs:
            name = "avx2.pmadd.ub.sw" if _BITS == 256 else "avx512.pmaddubs.w.512"
            inputs = inputs if signs is None else self._signed(inputs, signs)
            added = _called(builder, f"llvm.x86.{name}", _SHORTS, weights, inputs)
            added = added if signs is None else self._of_shorts(added)
            return added if total is None else builder.add(total, added)
        total = _all(_SUMS, 0) if total is None else total
        if self._native:
            name = f"llvm.x86.avx512.vpdpbusd.{_BITS}"
            return _called(builder, name, _SUMS, total, weights, inputs)
        for place in range(4):
            weight, given = (builder.bitcast(each, _SUMS) for each in (weights, inputs))
            weight = builder.and_(builder.lshr(weight, _all(_SUMS, 8 * place)), _all(_SUMS, 255))
            given = builder.shl(given, _all(_SUMS, 24 - 8 * place))
            given = builder.ashr(given, _all(_SUMS, 24))
            total = builder.add(total, builder.mul(weight, given))
        return total

    def _signed(self, inputs: Any, signs: Any) -> Any:
        """Return inputs, of those with a negative sign the opposites."""
        builder, none = self._builder, _all(_BYTES, 0)
        if _BITS == 256:
            return _called(builder, "llvm.x86.avx2.psign.b", _BYTES, inputs, signs)
        negative = builder.icmp_signed("<", signs, none)
        return builder.select(negative, builder.sub(none, inputs), inputs)

    def _of_shorts(self, given: Any) -> Any:
        """Return sums of 32 bits, of two of 16 each."""
        name = "avx2.pmadd.wd" if _BITS == 256 else "avx512.pmaddw.d.512"
        return _called(self._builder, f"llvm.x86.{name}", _SUMS, given, _all(_SHORTS, 1))

    def _load(self, at: Any, place: int, kind: Any) -> Any:
        return self._writer.load(self._builder.add(at, ir.Constant(LONG, place)), kind, 1)


@emits(numba.void, None, None, None, *[numba.intp] * 12)
def _multiply_pass(
    builder: Any,
    kind: Any,
    scale_kind: Any,
    tag: Any,
    rows: Any,
    blocks: Any,
    together: Any,
    parts: Any,
    weight_at: Any,
    scale_at: Any,
    offset_at: Any,
    rows_at: Any,
    row_bytes: Any,
    facts_at: Any,
    fact_bytes: Any,
    totals_at: Any,
) -> None:
    """Multiply 1 to `PASS_ROWS` rows with a panel and add to their totals, [rows, PANEL].

    Shape: `blocks`, of which `together` are of one group of the weight; a row's scale and what is to be added to its
    sums lie at `facts_at`, eight bytes a block. `offset_at` is 0 where there are none; `parts` are the vectors of a
    panel.
    """
    given = builder.zext(builder.icmp_signed("!=", offset_at, ir.Constant(LONG, 0)), LONG)
    number = builder.add(builder.mul(rows, ir.Constant(LONG, 2)), given)
    for case in cases(builder, number, range(2, 2 * PASS_ROWS + 2)):
        one = _Pass(builder, (kind, scale_kind, tag), case // 2, has_offsets=bool(case % 2))
        one.write(
            (blocks, together, parts),
            (weight_at, scale_at, offset_at),
            (rows_at, row_bytes),
            (facts_at, fact_bytes),
            totals_at,
        )


class _Pass:
    """Writes a pass of a number of rows.

    One row has all its totals in registers. The totals of more are in memory, and vectors of the panel are multiplied
    one or two at a time: LLVM is not told how many times, for it would do all at once and run out of registers.
    """

    def __init__(
        self, builder: Any, kinds: tuple[Any, Any, Any], count: int, *, has_offsets: bool
    ) -> None:
        kind, scale_kind, tag = kinds
        self._builder, self._writer = builder, InstructionWriter(builder)
        self._dots = _Dots(builder, kind, tag)
        self._half = scale_kind is numba.types.uint16
        self._count, self._has_offsets = count, has_offsets
        self._together = _TOGETHER[count]
        self._sum_scale = 8.0 if kind is numba.types.uint8 else 128.0

    def write(
        self,
        sizes: tuple[Any, Any, Any],
        weight: tuple[Any, Any, Any],
        rows: tuple[Any, Any],
        facts: tuple[Any, Any],
        totals_at: Any,
    ) -> None:
        """Write it."""
        builder, writer = self._builder, self._writer
        blocks, together, parts = sizes
        kept = self._together == VECTORS
        outer = Loop(builder, self._totals(totals_at) if kept else [])
        grid = PANEL * (2 if self._half else 4)
        grids = [writer.advance(at, outer.index, grid) for at in weight[1:]]
        first = builder.mul(outer.index, together)
        rest = builder.sub(blocks, first)
        last = builder.icmp_signed("<", rest, together)
        inner = Loop(builder, outer.carried)
        block = builder.add(first, inner.index)
        weight_at = writer.advance(weight[0], block, self._dots.weight_bytes)
        rows_at = self._of_rows(rows, block, ROW_BLOCK)
        facts_at = self._of_rows(facts, block, 8)
        totals: Sequence[Any] = inner.carried
        if kept:
            totals = self._block(totals, weight_at, rows_at, facts_at, grids)
        else:
            self._block_in_parts(totals_at, parts, weight_at, rows_at, facts_at, grids)
        inner.end(totals, builder.select(last, rest, together))
        rounded = builder.add(blocks, builder.sub(together, ir.Constant(LONG, 1)))
        outer.end(totals, builder.sdiv(rounded, together))
        if kept:
            self._keep(totals, totals_at)

    def _block_in_parts(
        self,
        totals_at: Any,
        parts: Any,
        weight_at: Any,
        rows_at: Sequence[Any],
        facts_at: Sequence[Any],
        grids: Sequence[Any],
    ) -> None:
        """Write the product by some vectors of a block after the other."""
        builder, writer = self._builder, self._writer
        width = self._together * OUTPUTS
        loop = Loop(builder, [])
        here = writer.advance(totals_at, loop.index, 4 * width)
        size = width * (2 if self._half else 4)
        found = self._block(
            self._totals(here),
            writer.advance(weight_at, loop.index, 4 * width),
            rows_at,
            facts_at,
            [writer.advance(at, loop.index, size) for at in grids],
        )
        self._keep(found, here)
        loop.end([], builder.sdiv(parts, ir.Constant(LONG, self._together)))

    def _block(
        self,
        given: Sequence[Any],
        weight_at: Any,
        rows_at: Sequence[Any],
        facts_at: Sequence[Any],
        grids: Sequence[Any],
    ) -> list[Any]:
        """Return totals to which the product by some vectors of a block is added."""
        builder, writer, vectors = self._builder, self._writer, range(self._together)
        sums, totals = self._dots.sums(weight_at, vectors, rows_at), list(given)
        for row, fact_at in enumerate(facts_at):
            factor = _spread(builder, writer.load(fact_at, _SINGLE, 4), OUTPUTS)
            taken = writer.load(builder.add(fact_at, ir.Constant(LONG, 4)), WORD, 4)
            for at, vector in enumerate(vectors, row * self._together):
                found = sums[at]
                if self._dots.centred:
                    found = builder.add(found, _spread(builder, taken, OUTPUTS))
                scale = builder.fmul(self._grid(grids[0], vector), factor)
                totals[at] = self._fused(builder.sitofp(found, _FLOATS), scale, totals[at])
                if self._has_offsets:
                    offset = builder.fmul(self._grid(grids[1], vector), factor)
                    of_row = _spread(builder, self._sum(taken), OUTPUTS)
                    totals[at] = self._fused(of_row, offset, totals[at])
        return totals

    def _of_rows(self, given: tuple[Any, Any], block: Any, size: int) -> list[Any]:
        """Return where a block of each row is, of rows that lie so many bytes apart."""
        advance = self._writer.advance
        starts = [advance(given[0], given[1], row) for row in range(self._count)]
        return [advance(start, block, size) for start in starts]

    def _places(self, totals_at: Any) -> list[Any]:
        places = [
            4 * (row * PANEL + vector * OUTPUTS)
            for row in range(self._count)
            for vector in range(self._together)
        ]
        return [self._builder.add(totals_at, ir.Constant(LONG, place)) for place in places]

    def _totals(self, totals_at: Any) -> list[Any]:
        return [self._writer.load(at, _FLOATS, 4) for at in self._places(totals_at)]

    def _keep(self, totals: Sequence[Any], totals_at: Any) -> None:
        for total, at in zip(totals, self._places(totals_at), strict=True):
            self._writer.store(total, at, 4)

    def _sum(self, taken: Any) -> Any:
        """Return the sum of a row's block as float32, out of what is to be added to its sums."""
        as_float = self._builder.sitofp(taken, _SINGLE)
        return self._builder.fmul(as_float, ir.Constant(_SINGLE, -1.0 / self._sum_scale))

    def _fused(self, one: Any, other: Any, total: Any) -> Any:
        """Return one times other plus total, rounded once: whatever rows are beside it, nothing else is made of it."""
        return _called(self._builder, f"llvm.fma.v{OUTPUTS}f32", _FLOATS, one, other, total)

    def _grid(self, at: Any, vector: int) -> Any:
        builder, size = self._builder, 2 if self._half else 4
        at = builder.add(at, ir.Constant(LONG, vector * OUTPUTS * size))
        if self._half:
            return builder.fpext(self._writer.load(at, _HALVES, 2), _FLOATS)
        return self._writer.load(at, _FLOATS, 4)


_VALUES = ir.VectorType(_SINGLE, ROW_BLOCK)
_WORDS = ir.VectorType(WORD, ROW_BLOCK)


@emits(numba.void, None, None, *[numba.intp] * 4)
def _round_blocks(
    builder: Any,
    row_kind: Any,
    kind: Any,
    row_at: Any,
    blocks: Any,
    out_at: Any,
    facts_at: Any,
) -> None:
    """Make whole blocks of a row into 8 bits; write values, and for each block its scale and what its sums lack."""
    writer = InstructionWriter(builder)
    loop = Loop(builder, [])
    if row_kind is numba.types.float32:
        at = writer.advance(row_at, loop.index, 4 * ROW_BLOCK)
        bits = builder.bitcast(writer.load(at, _VALUES, 4), _WORDS)
    else:
        at = writer.advance(row_at, loop.index, 2 * ROW_BLOCK)
        halves = writer.load(at, ir.VectorType(ir.IntType(16), ROW_BLOCK), 2)
        bits = builder.shl(builder.zext(halves, _WORDS), _all(_WORDS, 16))
    sizes = builder.and_(bits, _all(_WORDS, 0x7FFFFFFF))
    # Floats without a sign are ordered as the whole numbers of their bits; a NaN is the largest, and stays one.
    largest = builder.bitcast(
        _called(builder, f"llvm.vector.reduce.smax.v{ROW_BLOCK}i32", WORD, sizes), _SINGLE
    )
    nothing = builder.fcmp_ordered("<", largest, ir.Constant(_SINGLE, _LEAST))
    zero = ir.Constant(_SINGLE, 0.0)
    inverse = builder.fdiv(ir.Constant(_SINGLE, 127.0), largest)
    inverse = builder.select(nothing, zero, inverse)
    scale = builder.select(nothing, zero, builder.fdiv(largest, ir.Constant(_SINGLE, 127.0)))
    values = builder.fmul(builder.bitcast(bits, _VALUES), _spread(builder, inverse, ROW_BLOCK))
    values = _called(builder, f"llvm.rint.v{ROW_BLOCK}f32", _VALUES, values)
    numbers = builder.fptosi(values, _WORDS)
    total = _called(builder, f"llvm.vector.reduce.add.v{ROW_BLOCK}i32", WORD, numbers)
    out = writer.advance(out_at, loop.index, ROW_BLOCK)
    writer.store(builder.trunc(numbers, ir.VectorType(BYTE, ROW_BLOCK)), out, 1)
    centre = ir.Constant(WORD, -8 if kind is numba.types.uint8 else -128)
    facts = writer.advance(facts_at, loop.index, 8)
    writer.store(scale, facts, 4)
    writer.store(builder.mul(total, centre), builder.add(facts, ir.Constant(LONG, 4)), 4)
    loop.end([], blocks)


@compiled()
def _round_row(
    row_tag: Any, kind: Any, row_at: int, given: int, out_at: int, facts_at: int
) -> None:
    """Make a row of `given` inputs into 8 bits; the last block is filled up with zeros."""
    whole = given // ROW_BLOCK
    if whole:
        _round_blocks(row_tag[0], kind[0], row_at, whole, out_at, facts_at)
    rest = given - whole * ROW_BLOCK
    if rest:
        last = np.zeros(ROW_BLOCK, dtype=row_tag.dtype)
        if row_tag.itemsize == 4:
            singles = float32_array(row_at + 4 * whole * ROW_BLOCK, rest)
            for index in range(rest):
                last[index] = singles[index]
        else:
            values = bf16_array(row_at + 2 * whole * ROW_BLOCK, rest)
            for index in range(rest):
                last[index] = values[index]
        _round_blocks(
            row_tag[0], kind[0], last.ctypes.data, 1, out_at + whole * ROW_BLOCK,
            facts_at + 8 * whole,
        )  # fmt: skip


@compiled()
def _multiply_panels(
    first: int,
    stop: int,
    tags: Any,
    rows_at: int,
    row_bytes: int,
    facts: Any,
    weight_at: int,
    sizes: Any,
    scales_at: int,
    offsets_at: int,
    outputs: int,
    bias: Any,
    out_at: int,
) -> None:
    """Multiply all rows with the panels `first` to `stop`."""
    row_tag, kind, scale_kind, tag = tags
    panel_bytes, blocks, together, grid_bytes, vectors = sizes
    groups = (blocks + together - 1) // together
    rows = len(facts)
    totals = np.empty((rows, PANEL), dtype=np.float32)
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    for panel in range(first, stop):
        column = panel * PANEL
        totals[:] = bias[column : column + PANEL]
        at = groups * panel * grid_bytes
        row = 0
        for index in range(passes):
            count = (rows - row) // (passes - index)
            _multiply_pass(
                kind[0], scale_kind[0], tag[0], count, blocks, together, vectors,
                weight_at + panel * panel_bytes, scales_at + at,
                offsets_at + at if offsets_at else 0, rows_at + row * row_bytes, row_bytes,
                facts.ctypes.data + row * facts.strides[0], facts.strides[0],
                totals.ctypes.data + row * PANEL * 4,
            )  # fmt: skip
            row += count
        write_rows(
            row_tag, totals, out_at + column * row_tag.itemsize, outputs,
            min(PANEL, outputs - column),
        )  # fmt: skip


@threaded
def multiply_whole(
    threads: int,
    row_tag: Any,
    kind: Any,
    scale_kind: Any,
    tag: Any,
    rows_at: int,
    rows: int,
    given: int,
    weight_at: int,
    sizes: Any,
    scales_at: int,
    offsets_at: int,
    outputs: int,
    bias: Any,
    out_at: int,
) -> None:
    """Multiply rows by a weight in panels, on `threads` threads, each of which has neighbouring panels.

    Shape: rows [rows, given] and out [rows, outputs], of the type that `row_tag` says; bias float32 [padded outputs].
    `sizes` are bytes of a panel, blocks, blocks of a group, bytes of a panel's scales of a group, vectors of a
    panel.
    """
    item = row_tag.itemsize
    blocks = sizes[1]
    row_bytes = blocks * ROW_BLOCK
    own = rows <= OWN_ROWS_MAX
    copies = threads if own else 1
    taken = np.empty((copies, rows, row_bytes), dtype=np.int8)
    facts = np.empty((copies, rows, 2 * blocks), dtype=np.float32)
    if not own:
        for row in numba.prange(rows):
            _round_row(
                row_tag, kind, rows_at + row * given * item, given,
                taken[0, row].ctypes.data, facts[0, row].ctypes.data,
            )  # fmt: skip
    panels = (outputs + PANEL - 1) // PANEL
    for thread in numba.prange(threads):
        mine = np.int64(thread) if own else 0
        if own:
            for row in range(rows):
                _round_row(
                    row_tag, kind, rows_at + row * given * item, given,
                    taken[mine, row].ctypes.data, facts[mine, row].ctypes.data,
                )  # fmt: skip
        _multiply_panels(
            panels * thread // threads, panels * (thread + 1) // threads,
            (row_tag, kind, scale_kind, tag), taken[mine].ctypes.data, row_bytes, facts[mine],
            weight_at, sizes, scales_at, offsets_at, outputs, bias, out_at,
        )  # fmt: skip
