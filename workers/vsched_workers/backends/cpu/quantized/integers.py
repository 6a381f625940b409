"""GEMM of a quantized weight with dynamic int8 activation quantization, in blocks of inputs.

    s[m, b] = max_(k in b) |A[m, k]| / 127,   a[m, k] = round(A[m, k] / s[m, b])
    C[m, n] = bias[n] + sum_b s[m, b] * (scale[g, n] * sum_(k in b) a[m, k] * (q[n, k] - z)
                                         + offset[g, n] * sum_(k in b) a[m, k])

A block b has `ROW_BLOCK` inputs and lies within one group g of the weight. The int32 accumulators of a block are
exact; blocks are added in float32, one by one. Every row has its own scales and sums, so its result has the same bits
whatever other rows are in the batch: one decode row, a prefill chunk, or all rows of an image.

**Packing.** That of `kernel.py`: a 32-bit word per output holds four neighbouring inputs of int8 or eight of 4 bits,
the operand format of byte dot products (`block_sums.py`). Quantized activations are int8 [rows, inputs], with 8 bytes
per block:

  row_scales [rows, blocks, 2]:   float32 scale s[m, b]  |  int32 zero-point correction, -z * sum_(k in b) a[m, k]

The correction is the initial value of the block's accumulators, since weights enter the dot product as unsigned bytes
(z is 128 for int8, 8 for int4, 12 for fp4).

**Order.** A panel is multiplied chunk by chunk. A chunk stays in the L1 cache for the passes of a few rows each, and
each pass prefetches its share of the next chunk into the L2 cache. So memory reads overlap with the products.

Source: for int8 activations in blocks, the format Q8_0 of llama.cpp's ggml.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, float32_array
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits, kernel
from vsched_workers.backends.cpu.kernels.gemm import PRODUCT, panels_together
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
    splat,
)
from vsched_workers.backends.cpu.kernels.thread_pool import spread
from vsched_workers.backends.cpu.quantized.block_sums import (
    FLOATS,
    OUTPUTS,
    ROW_BLOCK,
    VECTORS,
    BlockSums,
)
from vsched_workers.backends.cpu.quantized.kernel import (
    PANEL,
    ZERO_POINTS,
    scale_vector,
    write_rows,
)

_WIDE = OUTPUTS == LANES
"""True with 32 registers of 512 bits, False with 16 of 256."""
PASS_ROWS = 6 if _WIDE else 4
"""Maximum rows of a pass."""
_INT8_PANELS = 2
"""Factor for the panels that a thread claims at once: an int8 weight is read in half the time of a bfloat16 one."""
OWN_ROWS_MAX = 8
"""Maximum rows that the calling thread quantizes alone: waiting for other threads would take longer."""
_TOGETHER = {1: 4, 2: 4 if _WIDE else 2, 3: 2, 4: 2, 5: 2, 6: 2}
"""Vectors that are multiplied at once, by rows of the pass: their accumulators fit into registers."""
_CHUNK_BYTES = 1 << 14
"""Bytes of a panel that all rows are multiplied by before the next ones: they stay in the L1 cache."""
_AHEAD = 1 << 15
"""Prefetch distance for weights into the L2 cache, bytes."""
_SHARING_ROWS = 3
"""Minimum rows of a pass if a panel may have several passes: each prefetches its share of the next weights."""
_SCALES_AHEAD = 2048
"""Prefetch distance for scales, bytes."""
_LEAST_BITS = int(np.float32(1e-30).view(np.int32))
"""Bits of the float32 below which the maximum of a block counts as zero."""

_SINGLE = ir.FloatType()


class _Chunk(NamedTuple):
    """A chunk of a panel.

    Attributes:
        blocks: Its number of blocks.
        together: Blocks that share a group of the weight.
        vectors: Vectors of a panel.
        weight_at: Address of the weights.
        scale_at: Address of the scales of its first group.
        offset_at: Address of the offsets; 0 if there are none.
        ahead_at: Address of the weights to prefetch into the L2 cache.
        lines: Lines to prefetch for each block.
    """

    blocks: Any
    together: Any
    vectors: Any
    weight_at: Any
    scale_at: Any
    offset_at: Any
    ahead_at: Any
    lines: Any


class _Rows(NamedTuple):
    """Quantized rows of a pass.

    Attributes:
        count: 1 to `PASS_ROWS`.
        at: Address of the inputs of the chunk in the first row.
        row_bytes: Bytes between rows.
        scales_at: Address of scale and zero-point correction, 8 bytes for each block.
        scale_bytes: Bytes between those of two rows.
        totals_at: Address of the accumulators, float32 [count, PANEL].
    """

    count: Any
    at: Any
    row_bytes: Any
    scales_at: Any
    scale_bytes: Any
    totals_at: Any


@emits(numba.void, None, None, None, _Chunk, _Rows)
def _multiply_pass(
    builder: Any, kind: Any, scale_kind: Any, tag: Any, chunk: _Chunk, rows: _Rows
) -> None:
    """Multiply some rows by a chunk of a panel and add to their accumulators.

    Emits one variant for each number of rows, with and without offsets.
    """
    has_offsets = builder.icmp_signed("!=", chunk.offset_at, ir.Constant(LONG, 0))
    number = builder.mul(rows.count, ir.Constant(LONG, 2))
    number = builder.add(number, builder.zext(has_offsets, LONG))
    for case in cases(builder, number, range(2, 2 * PASS_ROWS + 2)):
        one = _Pass(builder, (kind, scale_kind, tag), case // 2, has_offsets=bool(case % 2))
        one.write(chunk, rows)


class _Pass:
    """Emits a pass of a fixed number of rows: three nested loops.

      for part in vectors / together:              float32 totals of rows x together vectors in registers
          for group in groups:                     scales and offsets of the group
              for block in group:                  int32 accumulators: ROW_BLOCK inputs
                  totals += accumulators * scale * row scale  (+ row sum * offset * row scale)

    The number of iterations of the outer loop is a run-time value on purpose: with a constant LLVM would unroll it
    and run out of registers.
    """

    def __init__(
        self, builder: Any, kinds: tuple[Any, Any, Any], count: int, *, has_offsets: bool
    ) -> None:
        kind, scale_kind, tag = kinds
        self._builder, self._writer = builder, InstructionWriter(builder)
        self._dots = BlockSums(builder, kind, tag)
        self._scale_kind = scale_kind
        self._count, self._has_offsets = count, has_offsets
        self._together = _TOGETHER[count]
        self._zero_point = ZERO_POINTS[kind]

    def write(self, chunk: _Chunk, rows: _Rows) -> None:
        """Emit the loops."""
        builder, writer = self._builder, self._writer
        blocks, together, vectors = chunk.blocks, chunk.together, chunk.vectors
        width = self._together * OUTPUTS
        size = 2 if self._scale_kind is numba.types.uint16 else 4
        part = Loop(builder, [])
        here = writer.advance(rows.totals_at, part.index, 4 * width)
        begin = writer.advance(chunk.weight_at, part.index, 4 * width)
        begins = [
            writer.advance(at, part.index, size * width) for at in (chunk.scale_at, chunk.offset_at)
        ]
        outer = Loop(builder, self._totals(here))
        scales_at = [writer.advance(at, outer.index, size * PANEL) for at in begins]
        self._fetch_scales(scales_at, size * width)
        first = builder.mul(outer.index, together)
        rest = builder.sub(blocks, first)
        last = builder.icmp_signed("<", rest, together)
        inner = Loop(builder, outer.carried)
        block = builder.add(first, inner.index)
        at = [writer.advance(begin, block, self._dots.weight_bytes)]
        if self._count < _SHARING_ROWS:
            ahead_at = writer.advance(chunk.ahead_at, part.index, 4 * width)
            at.append(writer.advance(ahead_at, block, self._dots.weight_bytes))
        else:
            # Prefetch first: otherwise LLVM moves the accumulation after the loop of prefetches,
            # and spills its operands.
            index = builder.add(builder.mul(part.index, blocks), block)
            self._fetch(chunk.ahead_at, chunk.lines, index)
        totals = self._block(
            inner.carried,
            at,
            self._of_rows(rows.at, rows.row_bytes, block, ROW_BLOCK),
            self._of_rows(rows.scales_at, rows.scale_bytes, block, 8),
            scales_at,
        )
        inner.end(totals, builder.select(last, rest, together))
        rounded = builder.add(blocks, builder.sub(together, ir.Constant(LONG, 1)))
        outer.end(totals, builder.sdiv(rounded, together))
        self._keep(totals, here)
        part.end([], builder.sdiv(vectors, ir.Constant(LONG, self._together)))

    def _fetch(self, at: Any, lines: Any, index: Any) -> None:
        """Emit a pass's share of prefetches of the next weights: some lines per block."""
        builder = self._builder
        parts = VECTORS // self._together
        lines = builder.sdiv(self._writer.offset(lines, parts - 1), ir.Constant(LONG, parts))
        at = self._writer.advance(at, builder.mul(index, lines), LINE)
        loop = Loop(builder, [])
        self._writer.prefetch(self._writer.advance(at, loop.index, LINE), locality=2)
        loop.end([], lines)

    def _fetch_scales(self, scales_at: Sequence[Any], count: int) -> None:
        for at in scales_at if self._has_offsets else scales_at[:1]:
            for place in range(0, count, LINE):
                ahead_at = self._writer.offset(at, _SCALES_AHEAD + place)
                self._writer.prefetch(ahead_at, locality=2)

    def _block(
        self,
        carried: Sequence[Any],
        weight_at: Sequence[Any],
        rows_at: Sequence[Any],
        row_scales_at: Sequence[Any],
        scales_at: Sequence[Any],
    ) -> list[Any]:
        """Emit the products with some vectors of a block; returns the updated totals.

        `weight_at` is the address of the weights, optionally followed by the address to prefetch.
        """
        builder, writer, vectors = self._builder, self._writer, range(self._together)
        taken = [writer.load(writer.offset(at, 4), WORD, 4) for at in row_scales_at]
        first = [writer.broadcast(each, OUTPUTS) for each in taken]
        first = first if self._dots.has_correction else [None] * self._count
        sums = self._dots.sums(weight_at[0], vectors, rows_at, first, *weight_at[1:])
        totals = list(carried)
        for row, row_scale_at in enumerate(row_scales_at):
            factor = writer.broadcast(writer.load(row_scale_at, _SINGLE, 4), OUTPUTS)
            for at, vector in enumerate(vectors, row * self._together):
                scale = builder.fmul(self._load_scale(scales_at[0], vector), factor)
                totals[at] = self._fused(builder.sitofp(sums[at], FLOATS), scale, totals[at])
                if self._has_offsets:
                    offset = builder.fmul(self._load_scale(scales_at[1], vector), factor)
                    of_row = writer.broadcast(self._sum(taken[row]), OUTPUTS)
                    totals[at] = self._fused(of_row, offset, totals[at])
        return totals

    def _of_rows(self, at: Any, row_bytes: Any, block: Any, size: int) -> list[Any]:
        """Addresses of a block of each row."""
        advance = self._writer.advance
        starts = [advance(at, row_bytes, row) for row in range(self._count)]
        return [advance(start, block, size) for start in starts]

    def _places(self, totals_at: Any) -> list[Any]:
        places = [
            4 * (row * PANEL + vector * OUTPUTS)
            for row in range(self._count)
            for vector in range(self._together)
        ]
        return [self._writer.offset(totals_at, place) for place in places]

    def _totals(self, totals_at: Any) -> list[Any]:
        return [self._writer.load(at, FLOATS, 4) for at in self._places(totals_at)]

    def _keep(self, totals: Sequence[Any], totals_at: Any) -> None:
        for total, at in zip(totals, self._places(totals_at), strict=True):
            self._writer.store(total, at, 4)

    def _sum(self, taken: Any) -> Any:
        """Sum of a row's block as float32, from its zero-point correction."""
        as_float = self._builder.sitofp(taken, _SINGLE)
        return self._builder.fmul(as_float, ir.Constant(_SINGLE, -1.0 / self._zero_point))

    def _fused(self, one: Any, other: Any, total: Any) -> Any:
        """Emit one * other + total as one FMA, so that LLVM contracts it the same way for any number of rows."""
        return call_llvm(self._builder, f"llvm.fma.v{OUTPUTS}f32", FLOATS, one, other, total)

    def _load_scale(self, at: Any, vector: int) -> Any:
        return scale_vector(self._builder, self._scale_kind, at, vector, OUTPUTS)


_VALUES = ir.VectorType(_SINGLE, ROW_BLOCK)
_WORDS = ir.VectorType(WORD, ROW_BLOCK)


@emits(numba.void, None, None, *[numba.intp] * 4)
def _quantize_blocks(
    builder: Any,
    row_kind: Any,
    kind: Any,
    row_at: Any,
    blocks: Any,
    out_at: Any,
    row_scales_at: Any,
) -> None:
    """Quantize whole blocks of a row to int8; write values, and scale and zero-point correction of each block."""
    writer = InstructionWriter(builder)
    loop = Loop(builder, [])
    if row_kind is numba.types.float32:
        at = writer.advance(row_at, loop.index, 4 * ROW_BLOCK)
        bits = builder.bitcast(writer.load(at, _VALUES, 4), _WORDS)
    else:
        at = writer.advance(row_at, loop.index, 2 * ROW_BLOCK)
        halves = writer.load(at, ir.VectorType(ir.IntType(16), ROW_BLOCK), 2)
        bits = builder.shl(builder.zext(halves, _WORDS), splat(_WORDS, 16))
    sizes = builder.and_(bits, splat(_WORDS, 0x7FFFFFFF))
    # Non-negative floats are ordered as the integers of their bits; a NaN is the maximum and
    # remains a NaN.
    found = call_llvm(builder, f"llvm.vector.reduce.smax.v{ROW_BLOCK}i32", WORD, sizes)
    largest = builder.bitcast(found, _SINGLE)
    # As integers too: in a comparison of floats LLVM may assume that there are no NaNs.
    nothing = builder.icmp_signed("<", found, ir.Constant(WORD, _LEAST_BITS))
    zero = ir.Constant(_SINGLE, 0.0)
    inverse = builder.fdiv(ir.Constant(_SINGLE, 127.0), largest)
    inverse = builder.select(nothing, zero, inverse)
    scale = builder.select(nothing, zero, builder.fdiv(largest, ir.Constant(_SINGLE, 127.0)))
    values = builder.fmul(builder.bitcast(bits, _VALUES), writer.broadcast(inverse, ROW_BLOCK))
    values = call_llvm(builder, f"llvm.rint.v{ROW_BLOCK}f32", _VALUES, values)
    numbers = builder.fptosi(values, _WORDS)
    total = call_llvm(builder, f"llvm.vector.reduce.add.v{ROW_BLOCK}i32", WORD, numbers)
    out = writer.advance(out_at, loop.index, ROW_BLOCK)
    writer.store(builder.trunc(numbers, ir.VectorType(BYTE, ROW_BLOCK)), out, 1)
    zero_point = ir.Constant(WORD, -ZERO_POINTS[kind])
    row_scales = writer.advance(row_scales_at, loop.index, 8)
    writer.store(scale, row_scales, 4)
    writer.store(builder.mul(total, zero_point), writer.offset(row_scales, 4), 4)
    loop.end([], blocks)


@compiled()
def _quantize_row(
    row: int, row_tag: Any, kind: Any, rows_at: int, inputs: int, taken: Any, row_scales: Any
) -> None:
    """Quantize a row of unpadded inputs to int8; the last block is padded with zeros."""
    row_at = rows_at + row * inputs * row_tag.itemsize
    out_at, row_scales_at = taken[row].ctypes.data, row_scales[row].ctypes.data
    whole = inputs // ROW_BLOCK
    if whole:
        _quantize_blocks(row_tag[0], kind[0], row_at, whole, out_at, row_scales_at)
    rest = inputs - whole * ROW_BLOCK
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
        _quantize_blocks(
            row_tag[0], kind[0], last.ctypes.data, 1, out_at + whole * ROW_BLOCK,
            row_scales_at + 8 * whole,
        )  # fmt: skip


@compiled()
def _multiply_panels(
    first: int,
    stop: int,
    tags: Any,
    rows_at: int,
    row_bytes: int,
    row_scales: Any,
    weight: Any,
    outputs: int,
    out_at: int,
) -> None:
    """Multiply all rows by the panels `first` to `stop`."""
    (row_tag, kind, scale_kind, tag), product = tags, weight[0]
    blocks, together = product.inputs // ROW_BLOCK, product.group // ROW_BLOCK
    weight_at, offsets_at, vectors = product.weight_at, product.offsets_at, product.vectors
    groups = (blocks + together - 1) // together
    block_bytes = product.input_bytes * ROW_BLOCK
    panel_bytes = block_bytes * blocks
    chunk = max(_CHUNK_BYTES // block_bytes, 1)
    # A chunk is a whole number of groups, or part of one group.
    chunk = chunk // together * together if together <= chunk else chunk
    rows = len(row_scales)
    totals = np.empty((rows, PANEL), dtype=np.float32)
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    share = (block_bytes // LINE + passes - 1) // passes
    end_at = weight_at + (outputs + PANEL - 1) // PANEL * panel_bytes - _AHEAD
    for panel in range(first, stop):
        column = panel * PANEL
        totals[:] = float32_array(product.bias_at + 4 * column, PANEL)
        start = 0
        while start < blocks:
            group = start // together
            count = min(chunk, blocks - start)
            if together > chunk:
                count = min(count, (group + 1) * together - start)
            here = weight_at + panel * panel_bytes + start * block_bytes
            at = (groups * panel + group) * product.scale_row_bytes
            row = 0
            for index in range(passes):
                count_rows = (rows - row) // (passes - index)
                fetched = index * share
                fetches = here < end_at and fetched * LINE < block_bytes
                part = _Chunk(
                    count, together, vectors, here, product.scales_at + at, offsets_at + at if offsets_at else 0,
                    here + _AHEAD + fetched * count * LINE if fetches else here, share if fetches else 0,
                )  # fmt: skip
                taken = _Rows(
                    count_rows, rows_at + row * row_bytes + start * ROW_BLOCK, row_bytes,
                    row_scales.ctypes.data + row * row_scales.strides[0] + 8 * start, row_scales.strides[0],
                    totals.ctypes.data + row * PANEL * 4,
                )  # fmt: skip
                _multiply_pass(kind[0], scale_kind[0], tag[0], part, taken)
                row += count_rows
            start += count
        write_rows(
            row_tag, totals, out_at + column * row_tag.itemsize, outputs,
            min(PANEL, outputs - column),
        )  # fmt: skip


@kernel(*PRODUCT)
def multiply_int8(
    pool: int, tags: Any, weight: Any, rows_at: int, rows: int, outputs: int, out_at: int
) -> None:
    """Multiply rows by a weight in panels, with int8 activations; same arguments as `kernel.multiply`.

    The last tag selects the instructions (`block_sums.py`).
    """
    inputs, row_bytes = weight[0].inputs_unpadded, weight[0].inputs
    taken = np.empty((rows, row_bytes), dtype=np.int8)
    row_scales = np.empty((rows, 2 * (row_bytes // ROW_BLOCK)), dtype=np.float32)
    quantized = tags[0], tags[1], rows_at, inputs, taken, row_scales
    spread(pool, rows, OWN_ROWS_MAX, _quantize_row, quantized)
    panels = (outputs + PANEL - 1) // PANEL
    work = tags, taken.ctypes.data, row_bytes, row_scales, weight, outputs, out_at
    grain = panels_together(rows, inputs) * _INT8_PANELS
    spread(pool, panels, grain, _multiply_panels, work)
    taken[0, 0] = np.int8(0)  # keeps the buffer alive: only its address is used above
