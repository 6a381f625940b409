"""GEMM of float activations and a quantized weight, dequantized in registers, or for many rows once into the cache.

    C[m, n] = bias[n] + sum_g scale[g, n] * (sum_(k in g) A[m, k] * (q[n, k] - z)) + offset[g, n] * sum[m, g]

`scale` and `offset` belong to a group g of inputs, and z is the zero point of the packed format. (`offset`, of
asymmetric formats, is minus scale times their own zero point.) sum[m, g] is the sum of a row's inputs in group g.
Accumulators are float32; the result is float32 or rounded to bfloat16.

**Packing.** A weight [out, in] is packed into panels of `PANEL` outputs, [out / PANEL, in, PANEL], in one of the
types of `KINDS`:

  int8   one 32-bit word per output: inputs 4 j .. 4 j + 3, lowest byte first      [out / PANEL, in / 4, PANEL, 4]

  int4   one 32-bit word per output: inputs 8 j .. 8 j + 7, unsigned 0 .. 15

           bits    31..28  27..24  23..20  19..16  15..12  11..8    7..4    3..0
           input     7       3       6       2       5       1       4       0

  fp4    as int4, but codes of e2m1; the kernels multiply their numbers, in halves (`FP4_NUMBERS`)

  fp8, bfloat16, float32   one value per output and input                          [out / PANEL, in, PANEL]

`integers.py` reads integers in the same layout. For int4 z is 8, the zero point of the unsigned values;
it is subtracted once per block, not from each value. Scales and offsets are packed into panels of the same width,
[out / PANEL, groups, PANEL], as float32 or float16. Outputs are padded with zeros to whole panels, inputs to a
multiple of `INPUTS`.

**Subdivisions of K**, with groups of 32 and of 192 inputs:

  groups   | g0 | g1 | g2 | g3 | g4 ..  |        g0         | ..    one scale and offset per output
  blocks   | b0 | b1 | b2 | b3 | b4 ..  |   b0    |   b1    | ..    the group, or a divisor of it up to `BLOCK` inputs
  parts    |        p0         | p1 ..  |   p0    |   p1    | ..    as many whole blocks as `BLOCK` inputs hold

Activations are widened once and packed by parts, [parts, rows, BLOCK], and a panel is multiplied part by part, with
that part of the panel and of the rows of a pass in the L1 cache. Rows are next to each other because rows a power of
two apart would share cache sets. Each pass prefetches its share of the weights that are read next, so memory reads
overlap with the products.

**Few rows.** A pass multiplies up to `PASS_ROWS` rows by a block: accumulators stay in registers while weights are
read and widened. 16 registers of 256 bits hold the accumulators of six rows for half of a panel, so its halves follow
each other; with one or two rows both fit. For one row, reading the weights takes most of the time.

**Many rows.** A part of the panel is widened into the L1 cache once, and all rows are multiplied by it. If the rows do
not fit into the L3 cache, the result is computed in result blocks: a part of `RESULT_ROWS` rows stays in the L2 cache
while it is multiplied by `RESULT_PANELS` panels. With other programs in the L3 cache, 400 rows of 4096 inputs take 0.6
to 0.9 of the time without result blocks.

All paths add up in the same order: inputs of a block one by one, then block by block. So the result of a row has the
same bits whatever other rows are in the batch.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, float32_array, narrow, widen
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits, kernel
from vsched_workers.backends.cpu.kernels.gemm import PRODUCT, panels_together
from vsched_workers.backends.cpu.kernels.simd import (
    BYTE,
    FLOATS,
    LANES,
    LINE,
    LONG,
    WORDS,
    InstructionWriter,
    Loop,
    call_llvm,
    cases,
    has_avx512,
    has_permutation,
    splat,
)
from vsched_workers.backends.cpu.kernels.thread_pool import rows_together, spread

_WIDE = has_avx512()
_VECTORS = 4 if _WIDE else 2
PANEL = _VECTORS * LANES
"""Outputs of a panel: 64 with AVX-512 (four vectors), otherwise 32 (four registers of 256 bits)."""
PASS_ROWS = 6
"""Maximum rows of a pass: their accumulators leave registers for weights and inputs."""
INT4_CENTRE = 8
FP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Zero point of int4 and numbers of e2m1 codes, as in `quantized/weights.py`; repeated, as the kernel store is keyed by
kernel sources alone."""
INPUTS = 16
"""Inputs are padded to a multiple of this, and groups are multiples of it."""
BLOCK = 128
"""Maximum inputs of a block: the widened weights of a block fit into the L1 cache."""
FEW_ROWS_MAX = 4 * PASS_ROWS
"""Maximum rows for which each pass widens the weights again; the choice matters little up to three times this number.
"""
RESULT_ROWS, RESULT_PANELS = 192, 8
"""Rows and panels of a result block: a part of its rows, 96 KiB, and its accumulators, 192 KiB (AVX-512: 384), stay in
the L2 cache."""
WHOLE_ROWS_BYTES = 1 << 22
"""Maximum bytes of float32 activations without result blocks: a share of the L3 cache that other programs leave."""
_ROW_BYTES = 4 * BLOCK
"""Bytes between rows of a part."""
_UNROLLED = 4

INT8: npt.NDArray[Any] = np.zeros(1, dtype=np.int8)
INT4: npt.NDArray[Any] = np.zeros(1, dtype=np.uint8)
FP4: npt.NDArray[Any] = np.zeros(1, dtype=np.int32)
FP8: npt.NDArray[Any] = np.zeros(1, dtype=np.int16)
BF16: npt.NDArray[Any] = np.zeros(1, dtype=np.uint16)
_FLOAT32: npt.NDArray[Any] = np.zeros(1, dtype=np.float32)
"""Dtype tags: the type of this argument selects the compiled variant. A tag is the format read, not the storage type.
"""

KINDS: Mapping[str, npt.NDArray[Any]] = {
    "int8": INT8,
    "int4": INT4,
    "fp4": FP4,
    "fp8": FP8,
    "bfloat16": BF16,
    "float32": _FLOAT32,
}
FOUR_BIT_TAGS = (numba.types.uint8, numba.types.int32)
"""Types of the tags of int4 and fp4."""
ZERO_POINTS = {numba.types.int8: 128, numba.types.uint8: INT4_CENTRE, numba.types.int32: 12}
"""Zero points of unsigned bytes, by the types of the tags of integer formats."""
FP8_FACTOR = 256.0
"""FP8 (e4m3) is read as the float16 with the same bits, shifted: scales must be multiplied by this factor."""

BF16_ROWS: npt.NDArray[Any] = np.zeros(1, dtype=np.uint16)
FLOAT32_ROWS: npt.NDArray[Any] = np.zeros(1, dtype=np.float32)
"""Dtype tags of activations and results."""

FLOAT16_SCALES: npt.NDArray[Any] = np.zeros(1, dtype=np.uint16)
FLOAT32_SCALES: npt.NDArray[Any] = np.zeros(1, dtype=np.float32)
"""Dtype tags of scales: float16 and float32."""

_BYTES = ir.VectorType(BYTE, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_FLOAT16S = ir.VectorType(ir.HalfType(), LANES)


class _Panel(NamedTuple):
    """Addresses of a panel of a weight, and of the sums and accumulators of some rows.

    Attributes:
        scales_at: Scales.
        offsets_at: Offsets; 0 if there are none.
        sums_at: Sums of inputs, float32 [blocks, rows].
        sums_bytes: Bytes between the sums of two blocks.
        totals_at: Accumulators, float32 [rows, PANEL].
    """

    scales_at: int
    offsets_at: int
    sums_at: int
    sums_bytes: int
    totals_at: int


class Reader:
    """Emits loads of weights: for consecutive inputs, the vectors of a panel."""

    def __init__(self, builder: Any, kind: Any) -> None:
        self._builder = builder
        self._writer = InstructionWriter(builder)
        self._kind = kind

    @property
    def nibbles(self) -> int:
        """Number of half bytes (nibbles) per weight."""
        sizes = dict.fromkeys(FOUR_BIT_TAGS, 1) | {numba.types.uint16: 4, numba.types.float32: 8}
        return sizes.get(self._kind, 2)

    @property
    def is_wide(self) -> bool:
        """Whether weights are float32, as those widened into the cache are."""
        return self._kind is numba.types.float32

    @property
    def read_together(self) -> int:
        """Inputs packed into one word."""
        return 8 if self._kind in FOUR_BIT_TAGS else 4 if self._kind is numba.types.int8 else 1

    @property
    def unrolled(self) -> int:
        """Inputs per iteration."""
        return max(_UNROLLED, self.read_together)

    def load(self, at: Any, vector: int) -> Any:
        """Emit the load of one vector of the panel, with `read_together` inputs, the first one at `at`."""
        size = LANES * self.nibbles * self.read_together // 2
        kinds = {
            numba.types.float32: FLOATS,
            numba.types.uint16: _SHORTS,
            numba.types.int16: _BYTES,
        }
        return self._load(at, size * vector, kinds.get(self._kind, WORDS))

    def widened(self, loaded: Any, index: int) -> Any:
        """Emit the conversion of input `index` of a loaded vector to float32."""
        builder = self._builder
        if self._kind is numba.types.float32:
            return loaded
        if self._kind is numba.types.uint16:
            words = builder.zext(loaded, WORDS)
            return builder.bitcast(builder.shl(words, splat(WORDS, 16)), FLOATS)
        if self._kind is numba.types.int8:
            word = builder.shl(loaded, splat(WORDS, 24 - 8 * index))
            return builder.sitofp(builder.ashr(word, splat(WORDS, 24)), FLOATS)
        if self._kind in FOUR_BIT_TAGS:
            word = builder.lshr(loaded, splat(WORDS, 8 * (index % 4) + 4 * (index // 4)))
            if self._kind is numba.types.int32 and has_permutation():
                return self._writer.look_up(FP4_NUMBERS, word)
            word = builder.and_(word, splat(WORDS, 15))
            if self._kind is numba.types.int32:
                word = decode_fp4(builder, word)
            return builder.sitofp(word, FLOATS)
        shorts = builder.zext(loaded, _SHORTS)
        size = builder.shl(builder.and_(shorts, splat(_SHORTS, 0x7F)), splat(_SHORTS, 7))
        sign = builder.shl(builder.and_(shorts, splat(_SHORTS, 0x80)), splat(_SHORTS, 8))
        return builder.fpext(builder.bitcast(builder.or_(size, sign), _FLOAT16S), FLOATS)

    def _load(self, at: Any, place: int, kind: Any) -> Any:
        return self._writer.load(self._writer.offset(at, place), kind, 1)


def decode_fp4(builder: Any, codes: Any) -> Any:
    """Emit the numbers of e2m1 codes, of bytes or words: +-(c + max(c - 4, 0) + 2 max(c - 6, 0)), c of three bits."""
    kind = codes.type
    size = builder.and_(codes, splat(kind, 7))
    name, number = f"llvm.usub.sat.v{kind.count}i{kind.element.width}", size
    for start in (4, 6, 6):
        more = call_llvm(builder, name, kind, size, splat(kind, start))
        number = builder.add(number, more)
    negative = builder.icmp_unsigned(">", codes, splat(kind, 7))
    return builder.select(negative, builder.neg(number), number)


def scale_vector(builder: Any, kind: Any, at: Any, vector: int, lanes: int = LANES) -> Any:
    """Emit the load of a vector of scales, widened to float32."""
    writer, half = InstructionWriter(builder), kind is numba.types.uint16
    floats = ir.VectorType(ir.FloatType(), lanes)
    place = writer.offset(at, vector * lanes * (2 if half else 4))
    if half:
        return builder.fpext(writer.load(place, ir.VectorType(ir.HalfType(), lanes), 2), floats)
    return writer.load(place, floats, 4)


def _vectors_together(rows: int) -> range:
    """Split a panel's vectors for a pass: the start of each set whose accumulators fit into registers."""
    return range(0, _VECTORS, _VECTORS if _WIDE or rows < 3 else 1)


@emits(numba.void, None, None, *[numba.intp] * 10, numba.float32)
def _multiply_block(
    builder: Any,
    kind: Any,
    scale_kind: Any,
    rows: Any,
    rows_at: Any,
    weight_at: Any,
    inputs: Any,
    scale_at: Any,
    offset_at: Any,
    sums_at: Any,
    totals_at: Any,
    ahead_at: Any,
    ahead_bytes: Any,
    zero_point: Any,
) -> None:
    """Multiply 1 to `PASS_ROWS` rows by a block of a panel and add to their accumulators in memory.

    Shape: float32 rows, `_ROW_BYTES` apart. `sums_at` is the address of the first row's sum of inputs in this block;
    consecutive rows' sums are next to each other. `totals_at` is the address of the accumulators [rows, PANEL].
    `offset_at` is 0 if there are no offsets. Memory from `ahead_at` on is prefetched, `ahead_bytes` per `_UNROLLED`
    inputs.

    Emits one unrolled loop for each number of rows, with and without offsets. Register accumulators start at
    -zero_point * sum, which subtracts the zero point from all weights of the block.
    """
    writer = InstructionWriter(builder)
    has_offsets = builder.zext(builder.icmp_signed("!=", offset_at, ir.Constant(LONG, 0)), LONG)
    number = builder.add(builder.mul(rows, ir.Constant(LONG, 2)), has_offsets)
    for case in cases(builder, number, range(2, 2 * PASS_ROWS + 2)):
        count, with_offsets = case // 2, case % 2
        sums = [
            writer.load(writer.offset(sums_at, 4 * row), ir.FloatType(), 4) for row in range(count)
        ]
        together = _vectors_together(count)
        for first in together:
            vectors = range(first, first + together.step)
            initial: list[Any] = []
            for of_row in sums:
                start = writer.broadcast(builder.fneg(builder.fmul(of_row, zero_point)))
                initial += [start] * len(vectors)
            operands = rows_at, weight_at, inputs, ahead_at, ahead_bytes
            added = _sum_inputs(builder, kind, operands, vectors, initial)
            offsets = offset_at if with_offsets else None
            _add_scaled(builder, scale_kind, (scale_at, offsets), vectors, sums, added, totals_at)


def _sum_inputs(
    builder: Any,
    kind: Any,
    operands: tuple[Any, Any, Any, Any, Any],
    vectors: range,
    initial: Sequence[Any],
) -> Sequence[Any]:
    """Emit the loop over a block; returns the accumulators: `initial` plus the products, `vectors` per row."""
    rows_at, weight_at, inputs, ahead_at, ahead_bytes = operands
    writer, reader = InstructionWriter(builder), Reader(builder, kind)
    count = len(initial) // len(vectors)
    loop = Loop(builder, initial)
    step, unrolled = reader.read_together, reader.unrolled
    at = writer.advance(weight_at, loop.index, unrolled * PANEL * reader.nibbles // 2)
    inputs_at = writer.advance(rows_at, loop.index, 4 * unrolled)
    added = list(loop.carried)
    _fetch_ahead(builder, reader, loop.index, (ahead_at, ahead_bytes), vectors)
    for first in range(0, unrolled, step):
        here = writer.offset(at, first * PANEL * reader.nibbles // 2)
        loaded = [reader.load(here, vector) for vector in vectors]
        for index in range(step):
            addresses = [
                writer.offset(inputs_at, row * _ROW_BYTES + 4 * (first + index))
                for row in range(count)
            ]
            values = [writer.broadcast(writer.load(each, ir.FloatType(), 4)) for each in addresses]
            for vector, words in enumerate(loaded):
                weight = reader.widened(words, index)
                for row, value in enumerate(values):
                    at_sum = row * len(vectors) + vector
                    added[at_sum] = writer.multiply_add(added[at_sum], value, weight)
    loop.end(added, builder.sdiv(inputs, ir.Constant(LONG, unrolled)))
    return added


def _fetch_ahead(
    builder: Any, reader: Reader, index: Any, ahead: tuple[Any, Any], vectors: range
) -> None:
    """Emit the prefetches of one iteration over some vectors of a panel."""
    writer, (ahead_at, ahead_bytes) = InstructionWriter(builder), ahead
    ahead_bytes = builder.mul(ahead_bytes, ir.Constant(LONG, reader.unrolled // _UNROLLED))
    at = builder.add(ahead_at, builder.mul(index, ahead_bytes))
    lines = 1 if reader.is_wide else max(reader.unrolled * PANEL * reader.nibbles // 2 // LINE, 1)
    for line in range(lines * vectors.start // _VECTORS, lines * vectors.stop // _VECTORS):
        further = builder.sdiv(
            builder.mul(ahead_bytes, ir.Constant(LONG, line)), ir.Constant(LONG, lines)
        )
        writer.prefetch(builder.add(at, further), locality=2 if reader.is_wide else 3)


def _add_scaled(
    builder: Any,
    kind: Any,
    scales_at: tuple[Any, Any],
    vectors: range,
    sums: Sequence[Any],
    added: Sequence[Any],
    totals_at: Any,
) -> None:
    """Emit the epilogue of a block: totals += accumulators * scales, plus sums of rows * offsets, if any."""
    writer, (scale_at, offset_at) = InstructionWriter(builder), scales_at
    for vector in vectors:
        scale = scale_vector(builder, kind, scale_at, vector)
        offset = None if offset_at is None else scale_vector(builder, kind, offset_at, vector)
        for row, of_row in enumerate(sums):
            at = writer.offset(totals_at, 4 * (row * PANEL + vector * LANES))
            total = writer.load(at, FLOATS, 4)
            of_block = added[row * len(vectors) + vector - vectors.start]
            total = writer.multiply_add(total, of_block, scale)
            if offset is not None:
                total = writer.multiply_add(total, writer.broadcast(of_row), offset)
            writer.store(total, at, 4)


@emits(numba.void, None, *[numba.intp] * 3)
def _widen(builder: Any, kind: Any, weight_at: Any, inputs: Any, out_at: Any) -> None:
    """Write the weights of some inputs of a panel as float32, [inputs, PANEL]."""
    writer, reader = InstructionWriter(builder), Reader(builder, kind)
    loop, step = Loop(builder, []), reader.read_together
    at = writer.advance(weight_at, loop.index, step * PANEL * reader.nibbles // 2)
    target = writer.advance(out_at, loop.index, step * PANEL * 4)
    for vector in range(_VECTORS):
        loaded = reader.load(at, vector)
        for index in range(step):
            place = ir.Constant(LONG, 4 * (index * PANEL + vector * LANES))
            writer.store(reader.widened(loaded, index), builder.add(target, place), 4)
    loop.end([], builder.sdiv(inputs, ir.Constant(LONG, step)))


@compiled()
def _passes_of(rows: int, input_bytes: int) -> Any:
    """Passes for M rows: their number, minimum rows per pass, passes with one more row, and prefetched bytes.

    The prefetched bytes are a pass's share of the weights that are read next, per `_UNROLLED` inputs; an input of the
    panel has `input_bytes`.
    """
    number = (rows + PASS_ROWS - 1) // PASS_ROWS
    rows_min = rows // max(number, 1)
    ahead_bytes = (_UNROLLED * input_bytes + number - 1) // max(number, 1)
    return number, rows_min, rows - rows_min * number, ahead_bytes


@compiled()
def _multiply_part(
    kind: Any,
    scale_kind: Any,
    product: Any,
    panel: _Panel,
    passes: Any,
    rows_at: int,
    start: int,
    stop: int,
    weight_at: int,
    input_bytes: int,
    ahead_at: int,
) -> None:
    """Multiply some rows by the inputs `start` to `stop` of a panel, which begin at `weight_at`, `input_bytes` each.

    Shape: rows [rows, BLOCK], for these inputs. Each pass prefetches its share of the next weights, at `ahead_at`. For
    `passes` see `_passes_of`.
    """
    block, group = product.block, product.group
    number, rows_min, larger, ahead_bytes = passes
    offsets_at, zero_point = panel.offsets_at, product.zero_point
    first = 0
    for index in range(number):
        count = rows_min + int(index < larger)
        at = start
        while at < stop:
            scale_offset = at // group * product.scale_row_bytes
            _multiply_block(
                kind[0],
                scale_kind[0],
                count,
                rows_at + first * _ROW_BYTES + 4 * (at - start),
                weight_at + (at - start) * input_bytes,
                min(block, stop - at),
                panel.scales_at + scale_offset,
                offsets_at + scale_offset if offsets_at else 0,
                panel.sums_at + at // block * panel.sums_bytes + 4 * first,
                panel.totals_at + first * PANEL * 4,
                ahead_at + (index * (stop - start) + at - start) // _UNROLLED * ahead_bytes,
                ahead_bytes,
                zero_point,
            )
            at += block
        first += count


@compiled()
def _multiply_result_block(
    tags: Any, product: Any, rows: Any, sums: Any, totals: Any, widened: Any, first: int
) -> None:
    """Multiply the rows of a result block by its panels, from `first` on, part by part; add to their accumulators.

    Shape: rows [parts, rows, BLOCK], sums [blocks, rows], totals [panels, rows, PANEL]; `widened` [BLOCK, PANEL] is the
    buffer for parts that are widened into the cache, or empty.
    """
    _, kind, scale_kind, _ = tags
    length = BLOCK // product.block * product.block
    panels, input_bytes = len(totals), product.input_bytes
    groups = (product.inputs + product.group - 1) // product.group
    scale_bytes, panel_bytes = groups * product.scale_row_bytes, product.inputs * input_bytes
    passes = _passes_of(rows.shape[1], input_bytes)
    for part in range(len(rows)):
        start = part * length
        stop = min(start + length, product.inputs)
        rows_at = rows.ctypes.data + part * rows.strides[0]
        for index in range(panels):
            scale_offset = (first + index) * scale_bytes
            panel = _Panel(
                product.scales_at + scale_offset,
                product.offsets_at + scale_offset if product.offsets_at else 0,
                sums.ctypes.data,
                sums.strides[0],
                totals.ctypes.data + index * totals.strides[0],
            )
            weight_at = product.weight_at + (first + index) * panel_bytes
            at = weight_at + start * input_bytes
            # Read next: this part of the next panel, or after the last one the next part of the first.
            ahead_at = weight_at + panel_bytes + start * input_bytes
            if index + 1 == panels:
                ahead_at = weight_at - index * panel_bytes + stop * input_bytes
            if len(widened):
                widened_at = widened.ctypes.data
                _widen(kind[0], at, stop - start, widened_at)
                _multiply_part(
                    _FLOAT32, scale_kind, product, panel, passes, rows_at, start, stop,
                    widened_at, 4 * PANEL, ahead_at,
                )  # fmt: skip
            else:
                _multiply_part(
                    kind, scale_kind, product, panel, passes, rows_at, start, stop,
                    at, input_bytes, ahead_at,
                )  # fmt: skip


@compiled(fastmath=False)
def _sum_block(values: Any, first: int, stop: int) -> Any:
    """Sum of a block, in four accumulators.

    No fastmath: LLVM would choose the order, one in the compiling process, another in processes that load the kernel.
    """
    one, two, three, four = (np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0))
    for place in range(first, stop, 4):
        one += values[place]
        two += values[place + 1]
        three += values[place + 2]
        four += values[place + 3]
    return (one + two) + (three + four)


@compiled()
def _read_row(
    row: int, tag: Any, rows_at: int, inputs: int, block: int, packed_rows: Any, by_row: Any
) -> None:
    """Convert a row of unpadded inputs to float32, write it to its parts, padded with zeros, and sum up its blocks.

    The used length of a part is a whole number of blocks. `by_row` [rows, blocks] is empty if no sums are needed.
    """
    row_at = rows_at + row * inputs * tag.itemsize
    parts_at = packed_rows.ctypes.data + row * _ROW_BYTES
    part_bytes = packed_rows.shape[1] * _ROW_BYTES
    length = BLOCK // block * block
    for start in range(0, inputs, length):
        # By address: a slice of the array would have an unknown stride, which is not vectorized.
        part = float32_array(parts_at + start // length * part_bytes, BLOCK)
        count = min(length, inputs - start)
        if tag.itemsize == 4:
            singles = float32_array(row_at + 4 * start, count)
            for place in range(count):
                part[place] = singles[place]
        else:
            values = bf16_array(row_at + 2 * start, count)
            for place in range(count):
                part[place] = widen(values[place])
        for place in range(count, BLOCK):
            part[place] = np.float32(0.0)
        if len(by_row):
            for first in range(0, count, block):
                by_row[row, (start + first) // block] = _sum_block(part, first, first + block)


@compiled()
def write_rows(tag: Any, totals: Any, out_at: int, outputs: int, count: int) -> None:
    """Write `count` outputs of a panel's accumulators in the type of `tag`."""
    for row in range(len(totals)):
        if tag.itemsize == 4:
            singles = float32_array(out_at + 4 * row * outputs, count)
            for index in range(count):
                singles[index] = totals[row, index]
        else:
            values = bf16_array(out_at + 2 * row * outputs, count)
            for index in range(count):
                values[index] = narrow(totals[row, index])


@compiled()
def _result_block(rows: int, inputs: int) -> Any:
    """Maximum rows and panels of a result block.

    Activations that fit into the L3 cache are multiplied by one panel at a time. Of larger ones, a part stays in the
    L2 cache while it is multiplied by several panels: otherwise each panel would read all rows from memory.
    """
    if rows * inputs * 4 <= WHOLE_ROWS_BYTES:
        return rows, 1
    count = (rows + RESULT_ROWS - 1) // RESULT_ROWS
    return (rows + count - 1) // count, RESULT_PANELS


@compiled()
def _multiply_result_blocks(
    first: int,
    stop: int,
    tags: Any,
    weight: Any,
    packed_rows: Any,
    sums: Any,
    outputs: int,
    out_at: int,
) -> None:
    """Compute the result blocks `first` to `stop`, which are numbered along the outputs first."""
    tag, product = tags[0], weight[0]
    rows = packed_rows.shape[1]
    rows_max, panels_max = _result_block(rows, product.inputs)
    panels = (outputs + PANEL - 1) // PANEL
    across = (panels + panels_max - 1) // panels_max
    accumulators = np.empty(panels_max * min(rows_max, rows) * PANEL, dtype=np.float32)
    widened = np.empty((BLOCK if rows > FEW_ROWS_MAX else 0, PANEL), dtype=np.float32)
    for number in range(first, stop):
        panel, row = number % across * panels_max, number // across * rows_max
        panels_stop, rows_stop = min(panel + panels_max, panels), min(row + rows_max, rows)
        shape = panels_stop - panel, rows_stop - row, PANEL
        totals = accumulators[: shape[0] * shape[1] * PANEL].reshape(shape)
        for index in range(len(totals)):
            # A slice assignment checks shapes, and its error message takes seconds to compile.
            bias = float32_array(product.bias_at + 4 * (panel + index) * PANEL, PANEL)
            for each in range(totals.shape[1]):
                for place in range(PANEL):
                    totals[index, each, place] = bias[place]
        _multiply_result_block(
            tags, product, packed_rows[:, row:rows_stop], sums[:, row:rows_stop], totals, widened, panel
        )  # fmt: skip
        for index in range(len(totals)):
            column = (panel + index) * PANEL
            at = out_at + (row * outputs + column) * tag.itemsize
            write_rows(tag, totals[index], at, outputs, min(PANEL, outputs - column))


@kernel(*PRODUCT)
def multiply(
    pool: int, tags: Any, weight: Any, rows_at: int, rows: int, outputs: int, out_at: int
) -> None:
    """Multiply rows by a weight in panels, on the threads of a pool (`thread_pool.spread`).

    Shape: rows [rows, unpadded inputs] and out [rows, outputs], of the type of the first tag; weight `WEIGHT` [1], with
    a float32 bias. `outputs` are those of the weight, or fewer while memory is measured. The tags are those of the
    rows, of the weight, of its scales, and of instructions, which is not used here.
    """
    product = weight[0]
    inputs, block = product.inputs, product.block
    length = BLOCK // block * block
    packed_rows = np.empty(((inputs + length - 1) // length, rows, BLOCK), dtype=np.float32)
    sums = np.zeros(((inputs + block - 1) // block, rows), dtype=np.float32)
    # Sums take up to a tenth of the time of narrow products.
    has_sums = product.zero_point != 0 or product.offsets_at != 0
    by_row = sums.T if has_sums else sums.T[:0]
    read = tags[0], rows_at, product.inputs_unpadded, block, packed_rows, by_row
    spread(pool, rows, rows_together(inputs), _read_row, read)
    rows_max, panels_max = _result_block(rows, inputs)
    panels = (outputs + PANEL - 1) // PANEL
    count = (panels + panels_max - 1) // panels_max * ((rows + rows_max - 1) // rows_max)
    work = tags, weight, packed_rows, sums, outputs, out_at
    spread(pool, count, panels_together(rows, inputs), _multiply_result_blocks, work)
