"""AMX GEMM of many rows and a quantized weight: a panel, or a part of it, is dequantized to bfloat16 first.

    C[m, n] = bias[n] + sum_k A[m, k] * bfloat16(scale[g, n] * (q[n, k] - z) + offset[g, n])

Activations stay bfloat16. AMX multiplies bytes twice as fast, but each group of inputs has its own scales, so
accumulators would have to leave their tiles after each group, which costs more than it saves. From `ROWS_MIN` rows
on, dequantization takes little time compared with the products, which `tiles/kernel.py` computes.

**Conversion.** For integers with float16 scales and no offsets, the bits of a value are moved into the mantissa of a
float32 whose exponent is that of a power of two:

  31 30      23 22                 0
  | s | exponent |   .. q ..         |         x = 2^e + q

  scale * q = scale * x - scale * 2^e

This is exact: a float16 has 11 bits, and 2^e with a zero point at most 13, so the products have 24 bits, and the sum is
rounded once. It takes half the instructions of a conversion.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import FLOAT32, bf16_array
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits, kernel
from vsched_workers.backends.cpu.kernels.gemm import PRODUCT
from vsched_workers.backends.cpu.kernels.simd import (
    FLOATS,
    LANES,
    LINE,
    LONG,
    WORD,
    WORDS,
    InstructionWriter,
    Loop,
    call_llvm,
    cases,
    splat,
)
from vsched_workers.backends.cpu.kernels.thread_pool import spread
from vsched_workers.backends.cpu.quantized.kernel import (
    INT4_CENTRE,
    PANEL,
    Reader,
    scale_vector,
)
from vsched_workers.backends.cpu.tiles.kernel import (
    AHEAD_BYTES,
    HALF,
    OWN_ROWS_MAX,
    PAIR_BYTES,
    PASS_BYTES,
    STEP_BYTES,
    STEP_INPUTS,
    TILE_BYTES,
    TILE_ROWS,
    HalfPanel,
    PackedA,
    ResultC,
    configure_tiles,
    halves_together,
    multiply_half,
    next_line,
    pack_row,
    packed_bytes,
    parts_of,
    release_tiles,
    turn_of,
)

ROWS_MIN = TILE_ROWS + 1
"""Minimum rows for this kernel: more than one tile of rows."""
_VECTORS = PANEL // LANES


@emits(numba.void, None, None, *[numba.intp] * 6)
def _widen_group(
    builder: Any,
    kind: Any,
    scale_kind: Any,
    inputs: Any,
    weight_at: Any,
    scale_at: Any,
    offset_at: Any,
    out_at: Any,
    half_panel_bytes: Any,
) -> None:
    """Dequantize a group's weights of a panel to bfloat16, into two half-panels that begin `half_panel_bytes` apart.

    `offset_at` is 0 if there are no offsets.

      panel [in / 4, 64, 4] or words of int4     ->    half-panel 0: outputs 0 .. 31    [in / 2, 32, 2] bfloat16
                                                       half-panel 1: outputs 32 .. 63   [in / 2, 32, 2] bfloat16
    """
    number = builder.zext(builder.icmp_signed("!=", offset_at, ir.Constant(LONG, 0)), LONG)
    for has_offsets in cases(builder, number, (0, 1)):
        one = _Widening(builder, kind, scale_kind)
        scales_at = (scale_at, offset_at) if has_offsets else (scale_at,)
        one.write(inputs, weight_at, scales_at, (out_at, half_panel_bytes))


class _Widening:
    """Emits the dequantization of weights."""

    def __init__(self, builder: Any, kind: Any, scale_kind: Any) -> None:
        self._builder, self._writer = builder, InstructionWriter(builder)
        self._reader = Reader(builder, kind)
        self._kind, self._scale_kind = kind, scale_kind

    def write(
        self, inputs: Any, weight_at: Any, scales_at: Sequence[Any], out: tuple[Any, Any]
    ) -> None:
        """Emit the loop over a group's inputs."""
        builder, writer, reader = self._builder, self._writer, self._reader
        vectors = range(_VECTORS)
        scales = [scale_vector(builder, self._scale_kind, scales_at[0], each) for each in vectors]
        whole = self._kind in (numba.types.int8, numba.types.uint8)
        direct = whole and self._scale_kind is numba.types.uint16 and len(scales_at) == 1
        if direct:
            bases = {
                to: [builder.fmul(scale, splat(FLOATS, -self._zero(to))) for scale in scales]
                for to in {to for _, to in self._moves()}
            }
        else:
            zero_point = INT4_CENTRE if self._kind is numba.types.uint8 else 0
            added = [builder.fmul(scale, splat(FLOATS, -zero_point)) for scale in scales]
        if len(scales_at) > 1:
            offsets = [
                scale_vector(builder, self._scale_kind, scales_at[1], each) for each in vectors
            ]
            added = [builder.fadd(*pair) for pair in zip(added, offsets, strict=True)]
        loop, bytes_each = Loop(builder, []), PANEL * reader.nibbles // 2
        at = writer.advance(weight_at, loop.index, reader.unrolled * bytes_each)
        target = writer.advance(out[0], loop.index, reader.unrolled // 2 * PAIR_BYTES)
        for line in range(0, reader.unrolled * bytes_each, LINE):
            writer.prefetch(writer.offset(at, AHEAD_BYTES + line), locality=2)
        for vector in vectors:
            values: list[Any] = []
            for begin in range(0, reader.unrolled, reader.read_together):
                loaded = reader.load(writer.offset(at, begin * bytes_each), vector)
                if direct:
                    for place, to in self._moves():
                        value = self._number(loaded, place, to)
                        values.append(self._fused(value, scales[vector], bases[to][vector]))
                    continue
                for each in range(reader.read_together):
                    value = reader.widened(loaded, each)
                    values.append(self._fused(value, scales[vector], added[vector]))
            half = writer.advance(target, out[1], vector // 2)
            for pair in range(len(values) // 2):
                place = ir.Constant(LONG, pair * PAIR_BYTES + vector % 2 * LINE)
                both = self._pairs(values[2 * pair], values[2 * pair + 1])
                writer.store(both, builder.add(half, place), LINE)
        loop.end([], builder.sdiv(inputs, ir.Constant(LONG, reader.unrolled)))

    def _moves(self) -> Sequence[tuple[int, int]]:
        """For the inputs of a word, in order: their lowest bit in the word, and its target position in a float32."""
        if self._kind is numba.types.int8:
            return [(place, 8) for place in (0, 8, 16, 24)]
        # Inputs with the same shift share one instruction.
        return [(0, 8), (8, 8), (16, 16), (24, 12), (4, 12), (12, 12), (20, 8), (28, 16)]

    def _zero(self, to: int) -> int:
        """Value of the float32 built from an input of zero: a power of two plus the zero point."""
        return (1 << 23 - to) + (128 if self._kind is numba.types.int8 else INT4_CENTRE)

    def _number(self, loaded: Any, place: int, to: int) -> Any:
        """Emit the float32 of an input plus a power of two; signed inputs are counted from the minimum."""
        builder, signed = self._builder, self._kind is numba.types.int8
        word = loaded
        if place < to:
            word = builder.shl(word, splat(WORDS, to - place))
        elif place > to:
            word = builder.lshr(word, splat(WORDS, place - to))
        flipped = (23 - to + 127) << 23 | (128 << to if signed else 0)
        word = builder.and_(word, splat(WORDS, (255 if signed else 15) << to))
        return builder.bitcast(builder.xor(word, splat(WORDS, flipped)), FLOATS)

    def _fused(self, value: Any, scale: Any, added: Any) -> Any:
        """Emit value * scale + added as one FMA: the product alone may not be exact."""
        return call_llvm(self._builder, f"llvm.fma.v{LANES}f32", FLOATS, value, scale, added)

    def _pairs(self, lower: Any, upper: Any) -> Any:
        """Interleave two float32 vectors as pairs of bfloat16."""
        both = self._writer.narrow_both(lower, upper)
        order = [at for lane in range(LANES) for at in (lane, LANES + lane)]
        return self._builder.shuffle_vector(both, both, ir.Constant(ir.VectorType(WORD, 32), order))


@compiled()
def _multiply_panels(
    first: int,
    stop: int,
    tags: Any,
    rows: int,
    rows_at: int,
    weight: Any,
    outputs: int,
    out_at: int,
) -> None:
    """Multiply all rows by the panels `first` to `stop`."""
    (_, kind, scale_kind, _), product = tags, weight[0]
    inputs, group, input_bytes = product.inputs, product.group, product.input_bytes
    weight_at, scales_at, offsets_at = product.weight_at, product.scales_at, product.offsets_at
    inputs_unpadded, scale_row_bytes = product.inputs_unpadded, product.scale_row_bytes
    c = ResultC(FLOAT32, product.bias_at, out_at, outputs)
    groups = (inputs + group - 1) // group
    configure_tiles(rows)
    parts = parts_of(rows, inputs_unpadded, stop - first, 2)
    buffer = np.empty(max(parts.sums_bytes * parts.together, PASS_BYTES) + LINE, dtype=np.uint8)
    half_panel_bytes = parts.size * STEP_BYTES
    widened = np.empty(2 * half_panel_bytes + LINE, dtype=np.uint8)
    for turn in range((stop - first) * parts.number):
        piece, index, sums_index = turn_of(turn, stop - first, parts)
        panel = first + piece
        start_step, stop_step = index * parts.size, min((index + 1) * parts.size, parts.steps)
        at, until = start_step * STEP_INPUTS, min(stop_step * STEP_INPUTS, inputs)
        to_at = next_line(widened)
        while at < until:
            count = min((at // group + 1) * group, until) - at
            scales_offset = (groups * panel + at // group) * scale_row_bytes
            _widen_group(
                kind[0], scale_kind[0], count,
                weight_at + (panel * inputs + at) * input_bytes,
                scales_at + scales_offset, offsets_at + scales_offset if offsets_at else 0, to_at, half_panel_bytes,
            )  # fmt: skip
            at += count
            to_at += count // 2 * PAIR_BYTES
        missing = (stop_step * STEP_INPUTS - at) * HALF
        a = PackedA(rows, rows_at + start_step * TILE_BYTES, parts.steps * TILE_BYTES)
        # All outputs of the last panel may be in its first half-panel.
        for half in range(min(2, (outputs - panel * PANEL + HALF - 1) // HALF)):
            bf16_array(to_at + half * half_panel_bytes, missing)[:] = np.uint16(0)
            b = HalfPanel(
                2 * panel + half, next_line(widened) + half * half_panel_bytes, stop_step - start_step, 0,
                start_step == 0, stop_step == parts.steps, 0, 0,
            )  # fmt: skip
            sums_at = (
                next_line(buffer) + sums_index * parts.sums_bytes + half * (parts.sums_bytes // 2)
            )
            multiply_half(a, b, c, sums_at)
    release_tiles()


@kernel(*PRODUCT)
def multiply_widened(
    pool: int, tags: Any, weight: Any, rows_at: int, rows: int, outputs: int, out_at: int
) -> None:
    """Multiply rows by a weight in panels, on the threads of a pool (`thread_pool.spread`).

    Same arguments as `kernel.multiply`, but rows are bfloat16.
    """
    inputs = weight[0].inputs_unpadded
    packed_rows = np.empty(packed_bytes(rows, inputs) + LINE, dtype=np.uint8)
    spread(pool, rows, OWN_ROWS_MAX, pack_row, (rows_at, inputs, next_line(packed_rows)))
    panels = (outputs + PANEL - 1) // PANEL
    work = tags, rows, next_line(packed_rows), weight, outputs, out_at
    spread(pool, panels, halves_together(rows, inputs, panels, 2), _multiply_panels, work)
    packed_rows[0] = np.uint8(0)  # keeps the buffer alive: only its address is used above
