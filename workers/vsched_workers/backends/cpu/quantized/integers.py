"""The product of rows and a quantised weight in whole numbers: rows are made into 8 bits first, block by block.

    s[r, b] = max_(i in b) |rows[r, i]| / 127,   n[r, i] = round(rows[r, i] / s[r, b])
    out[r, o] = bias[o] + sum_b s[r, b] * (scale[g, o] * sum_(i in b) n[r, i] * (q[o, i] - centre)
                                           + offset[g, o] * sum_(i in b) n[r, i])

where a block b has `ROW_BLOCK` inputs and lies in one group g of the weight. The sums in a block are exact; blocks are
added up in float32, one by one. Every row has its own scales and sums, so its result has the same bits whatever rows
are beside it: one row of decode, a chunk of prefill, or all rows of an image.

**Layout.** That of `kernel.py`: four neighbouring inputs of an output are four bytes, or of int4 eight inputs, the
first four of which are the lower halves. That is what instructions for sums of bytes take (`block_sums.py`).

**Order.** A panel is multiplied chunk by chunk: a chunk lies in the first cache while passes of a few rows go over it,
and each pass fetches its share of what comes next into the second cache. So memory is read while registers multiply.

Source: for rows of 8 bits in blocks, the format Q8_0 of llama.cpp's ggml.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, float32_array
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits
from vsched_workers.backends.cpu.kernels.gemm import panels_together
from vsched_workers.backends.cpu.kernels.simd import (
    BYTE,
    LANES,
    LINE,
    LONG,
    WORD,
    InstructionWriter,
    Loop,
    call_llvm,
    cases,
)
from vsched_workers.backends.cpu.kernels.thread_pool import spread
from vsched_workers.backends.cpu.quantized.block_sums import (
    FLOATS,
    OUTPUTS,
    ROW_BLOCK,
    VECTORS,
    BlockSums,
    constant_vector,
    in_every_lane,
)
from vsched_workers.backends.cpu.quantized.kernel import PANEL, write_rows

_WIDE = OUTPUTS == LANES
"""Whether there are 32 registers of 512 bits, or 16 of 256."""
PASS_ROWS = 6 if _WIDE else 4
"""Most rows of a pass."""
_INT8_PANELS = 2
"""A weight of 8 bits is read in half the time of one of bfloat16."""
OWN_ROWS_MAX = 8
"""Most rows that every thread makes into 8 bits for itself: to wait for one another would take longer."""
_TOGETHER = {1: 4, 2: 4 if _WIDE else 2, 3: 2, 4: 2, 5: 2, 6: 2}
"""Vectors that are multiplied together, by the rows of a pass: as many sums as registers hold."""
_CHUNK_BYTES = 1 << 14
"""Bytes of a panel that all rows are multiplied with before the next ones: they lie in the first cache meanwhile."""
_AHEAD = 1 << 15
"""Bytes that weights are fetched ahead of their use, into the second cache."""
_SHARING_ROWS = 3
"""Fewest rows of a pass of which there may be several over a panel: each fetches its share of what comes next."""
_SCALES_AHEAD = 2048
"""The same of scales."""
_LEAST_BITS = int(np.float32(1e-30).view(np.int32))
"""A block of which no value is larger is one of zeros; the bits of a float32."""

_SINGLE = ir.FloatType()
_HALVES = ir.VectorType(ir.HalfType(), OUTPUTS)


@emits(numba.void, None, None, None, *[numba.intp] * 14)
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
    ahead_at: Any,
    lines: Any,
) -> None:
    """Multiply 1 to `PASS_ROWS` rows with a panel and add to their totals, [rows, PANEL].

    Shape: `blocks`, of which `together` are of one group of the weight; a row's scale and what is to be added to its
    sums lie at `facts_at`, eight bytes a block. `offset_at` is 0 where there are none; `parts` are the vectors of a
    panel. From `ahead_at` on, so many lines a block are fetched into the second cache.
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
            (ahead_at, lines),
        )


class _Pass:
    """Writes a pass of a number of rows.

    All totals are in registers, and one, two or four vectors of the panel are multiplied at a time. LLVM is not told
    how many times, for it would do all at once and run out of registers.
    """

    def __init__(
        self, builder: Any, kinds: tuple[Any, Any, Any], count: int, *, has_offsets: bool
    ) -> None:
        kind, scale_kind, tag = kinds
        self._builder, self._writer = builder, InstructionWriter(builder)
        self._dots = BlockSums(builder, kind, tag)
        self._scale_bytes = 2 if scale_kind is numba.types.uint16 else 4
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
        ahead: tuple[Any, Any],
    ) -> None:
        """Write it."""
        builder, writer = self._builder, self._writer
        blocks, together, vectors = sizes
        width, size = self._together * OUTPUTS, self._scale_bytes
        part = Loop(builder, [])
        here = writer.advance(totals_at, part.index, 4 * width)
        begin = writer.advance(weight[0], part.index, 4 * width)
        begins = [writer.advance(at, part.index, size * width) for at in weight[1:]]
        outer = Loop(builder, self._totals(here))
        grids = [writer.advance(at, outer.index, size * PANEL) for at in begins]
        self._fetch_scales(grids, size * width)
        first = builder.mul(outer.index, together)
        rest = builder.sub(blocks, first)
        last = builder.icmp_signed("<", rest, together)
        inner = Loop(builder, outer.carried)
        block = builder.add(first, inner.index)
        at = [writer.advance(begin, block, self._dots.weight_bytes)]
        if self._count < _SHARING_ROWS:
            ahead_at = writer.advance(ahead[0], part.index, 4 * width)
            at.append(writer.advance(ahead_at, block, self._dots.weight_bytes))
        else:
            # First: LLVM would move sums behind this loop, and keep what they are made of in memory meanwhile.
            self._fetch(ahead, builder.add(builder.mul(part.index, blocks), block))
        totals = self._block(
            inner.carried,
            at,
            self._of_rows(rows, block, ROW_BLOCK),
            self._of_rows(facts, block, 8),
            grids,
        )
        inner.end(totals, builder.select(last, rest, together))
        rounded = builder.add(blocks, builder.sub(together, ir.Constant(LONG, 1)))
        outer.end(totals, builder.sdiv(rounded, together))
        self._keep(totals, here)
        part.end([], builder.sdiv(vectors, ir.Constant(LONG, self._together)))

    def _fetch(self, ahead: tuple[Any, Any], index: Any) -> None:
        """Write how a pass fetches its share of the weights that come next: some lines each time."""
        builder, (at, lines) = self._builder, ahead
        parts = VECTORS // self._together
        lines = builder.sdiv(
            builder.add(lines, ir.Constant(LONG, parts - 1)), ir.Constant(LONG, parts)
        )
        at = self._writer.advance(at, builder.mul(index, lines), LINE)
        loop = Loop(builder, [])
        self._writer.prefetch(self._writer.advance(at, loop.index, LINE), locality=2)
        loop.end([], lines)

    def _fetch_scales(self, grids: Sequence[Any], count: int) -> None:
        for at in grids if self._has_offsets else grids[:1]:
            for place in range(0, count, LINE):
                ahead_at = self._builder.add(at, ir.Constant(LONG, _SCALES_AHEAD + place))
                self._writer.prefetch(ahead_at, locality=2)

    def _block(
        self,
        given: Sequence[Any],
        weight_at: Sequence[Any],
        rows_at: Sequence[Any],
        facts_at: Sequence[Any],
        grids: Sequence[Any],
    ) -> list[Any]:
        """Return totals to which the product by some vectors of a block is added.

        `weight_at` is where their weights lie, and maybe what is to be fetched meanwhile.
        """
        builder, writer, vectors = self._builder, self._writer, range(self._together)
        taken = [writer.load(builder.add(at, ir.Constant(LONG, 4)), WORD, 4) for at in facts_at]
        first = [in_every_lane(builder, each, OUTPUTS) for each in taken]
        first = first if self._dots.centred else [None] * self._count
        sums, totals = (
            self._dots.sums(weight_at[0], vectors, rows_at, first, *weight_at[1:]),
            list(given),
        )
        for row, fact_at in enumerate(facts_at):
            factor = in_every_lane(builder, writer.load(fact_at, _SINGLE, 4), OUTPUTS)
            for at, vector in enumerate(vectors, row * self._together):
                scale = builder.fmul(self._grid(grids[0], vector), factor)
                totals[at] = self._fused(builder.sitofp(sums[at], FLOATS), scale, totals[at])
                if self._has_offsets:
                    offset = builder.fmul(self._grid(grids[1], vector), factor)
                    of_row = in_every_lane(builder, self._sum(taken[row]), OUTPUTS)
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
        return [self._writer.load(at, FLOATS, 4) for at in self._places(totals_at)]

    def _keep(self, totals: Sequence[Any], totals_at: Any) -> None:
        for total, at in zip(totals, self._places(totals_at), strict=True):
            self._writer.store(total, at, 4)

    def _sum(self, taken: Any) -> Any:
        """Return the sum of a row's block as float32, out of what is to be added to its sums."""
        as_float = self._builder.sitofp(taken, _SINGLE)
        return self._builder.fmul(as_float, ir.Constant(_SINGLE, -1.0 / self._sum_scale))

    def _fused(self, one: Any, other: Any, total: Any) -> Any:
        """Return one times other plus total, rounded once: whatever rows are beside it, nothing else is made of it."""
        return call_llvm(self._builder, f"llvm.fma.v{OUTPUTS}f32", FLOATS, one, other, total)

    def _grid(self, at: Any, vector: int) -> Any:
        builder, size = self._builder, self._scale_bytes
        at = builder.add(at, ir.Constant(LONG, vector * OUTPUTS * size))
        if size == 2:
            return builder.fpext(self._writer.load(at, _HALVES, 2), FLOATS)
        return self._writer.load(at, FLOATS, 4)


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
        bits = builder.shl(builder.zext(halves, _WORDS), constant_vector(_WORDS, 16))
    sizes = builder.and_(bits, constant_vector(_WORDS, 0x7FFFFFFF))
    # Floats without a sign are ordered as the whole numbers of their bits; a NaN is the largest, and stays one.
    found = call_llvm(builder, f"llvm.vector.reduce.smax.v{ROW_BLOCK}i32", WORD, sizes)
    largest = builder.bitcast(found, _SINGLE)
    # As whole numbers, too: compared as floats, LLVM may take it that there are no NaNs.
    nothing = builder.icmp_signed("<", found, ir.Constant(WORD, _LEAST_BITS))
    zero = ir.Constant(_SINGLE, 0.0)
    inverse = builder.fdiv(ir.Constant(_SINGLE, 127.0), largest)
    inverse = builder.select(nothing, zero, inverse)
    scale = builder.select(nothing, zero, builder.fdiv(largest, ir.Constant(_SINGLE, 127.0)))
    values = builder.fmul(
        builder.bitcast(bits, _VALUES), in_every_lane(builder, inverse, ROW_BLOCK)
    )
    values = call_llvm(builder, f"llvm.rint.v{ROW_BLOCK}f32", _VALUES, values)
    numbers = builder.fptosi(values, _WORDS)
    total = call_llvm(builder, f"llvm.vector.reduce.add.v{ROW_BLOCK}i32", WORD, numbers)
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
    block_bytes = panel_bytes // blocks
    chunk = max(_CHUNK_BYTES // block_bytes, 1)
    # A chunk is of whole groups, or in one group.
    chunk = chunk // together * together if together <= chunk else chunk
    rows = len(facts)
    totals = np.empty((rows, PANEL), dtype=np.float32)
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    share = (block_bytes // LINE + passes - 1) // passes
    end_at = weight_at + (outputs + PANEL - 1) // PANEL * panel_bytes - _AHEAD
    for panel in range(first, stop):
        column = panel * PANEL
        totals[:] = bias[column : column + PANEL]
        start = 0
        while start < blocks:
            group = start // together
            count = min(chunk, blocks - start)
            if together > chunk:
                count = min(count, (group + 1) * together - start)
            here = weight_at + panel * panel_bytes + start * block_bytes
            at = (groups * panel + group) * grid_bytes
            row = 0
            for index in range(passes):
                count_rows = (rows - row) // (passes - index)
                fetched = index * share
                fetches = here < end_at and fetched * LINE < block_bytes
                _multiply_pass(
                    kind[0], scale_kind[0], tag[0], count_rows, count, together, vectors, here,
                    scales_at + at, offsets_at + at if offsets_at else 0,
                    rows_at + row * row_bytes + start * ROW_BLOCK, row_bytes,
                    facts.ctypes.data + row * facts.strides[0] + 8 * start, facts.strides[0],
                    totals.ctypes.data + row * PANEL * 4,
                    here + _AHEAD + fetched * count * LINE if fetches else here,
                    share if fetches else 0,
                )  # fmt: skip
                row += count_rows
            start += count
        write_rows(
            row_tag, totals, out_at + column * row_tag.itemsize, outputs,
            min(PANEL, outputs - column),
        )  # fmt: skip


@compiled()
def _round_rows(
    first: int, stop: int, row_tag: Any, kind: Any, rows_at: int, given: int, taken: Any, facts: Any
) -> None:
    for row in range(first, stop):
        _round_row(
            row_tag, kind, rows_at + row * given * row_tag.itemsize, given,
            taken[row].ctypes.data, facts[row].ctypes.data,
        )  # fmt: skip


@compiled()
def multiply_whole(
    pool: int,
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
    """Multiply rows by a weight in panels, on the threads of a pool (`thread_pool.spread`).

    Shape: rows [rows, given] and out [rows, outputs], of the type that `row_tag` says; bias float32 [padded outputs].
    `sizes` are bytes of a panel, blocks, blocks of a group, bytes of a panel's scales of a group, vectors of a
    panel.
    """
    row_bytes = sizes[1] * ROW_BLOCK
    taken = np.empty((rows, row_bytes), dtype=np.int8)
    facts = np.empty((rows, 2 * sizes[1]), dtype=np.float32)
    spread(pool, rows, OWN_ROWS_MAX, _round_rows, (row_tag, kind, rows_at, given, taken, facts))
    panels = (outputs + PANEL - 1) // PANEL
    work = (
        (row_tag, kind, scale_kind, tag), taken.ctypes.data, row_bytes, facts,
        weight_at, sizes, scales_at, offsets_at, outputs, bias, out_at,
    )  # fmt: skip
    spread(pool, panels, panels_together(rows, given) * _INT8_PANELS, _multiply_panels, work)
    taken[0, 0] = np.int8(0)  # its address is used above: it must live until here
