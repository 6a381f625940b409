"""GEMM of bfloat16 activations and a packed weight.

    C[m, n] = bias[n] + sum_k A[m, k] * B[n, k]      (float32 accumulators, result rounded)

**Packing.** The weight B [N, K] is packed into panels of 64 outputs, with pairs of neighbouring inputs together:
[N / 64, K / 2, 64, 2]. VDPBF16PS (`simd.py`) takes pairs, and oneDNN packs weights in the same way. Weight and bias
are padded with zeros to whole panels. For a diagram see `products.py`.

**Blocking.** A pass multiplies up to 6 rows by a panel. Its 6 x 4 vectors of accumulators stay in registers over all
of K, with 4 vectors of weights and one broadcast input:

              b0   b1   b2   b3       4 vectors of a panel: 64 outputs, one pair of inputs
  a (row 0)   c00  c01  c02  c03
    ..
  a (row 5)   c50  c51  c52  c53      29 of 32 registers

**Prefetch.** The first pass over a panel reads it from memory, the others from the L2 cache. Each pass prefetches its
share of the next panel, so that memory is read during all of them: 7 to 12 rows take 0.83 to 0.93 of the time
without it, 32 rows 0.93 to 0.95.

**Weights.** All kernels of products (`multiply` here, in `tiles/kernel.py` and in `quantized/`) take the same
arguments: the thread pool, dtype tags that select the compiled variant, a record that describes the packed weight
(`WEIGHT`), the rows, and the result.

Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (ACM TOMS 2008), for panels and
register blocking.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import copy
from vsched_workers.backends.cpu.kernels.compilation import array_of, compiled, emits, kernel
from vsched_workers.backends.cpu.kernels.simd import (
    BF16_PAIRS,
    BF16S,
    FLOATS,
    LANES,
    LINE,
    WORD,
    WORDS,
    ZEROS,
    InstructionWriter,
    Loop,
    cases,
    splat,
)
from vsched_workers.backends.cpu.kernels.thread_pool import spread

PANEL = 64
"""Outputs (N) of a panel."""
PASS_ROWS = 6
"""Maximum rows of a pass: their accumulators, four vectors each, leave registers for four weights and one input."""
_TOGETHER_PRODUCTS = 1 << 17
"""Products that a thread claims at once: about 10 microseconds, or reading 256 KiB."""
_PAIR_BYTES = PANEL * 2 * 2
"""Bytes of one pair of inputs in a panel."""
_AHEAD_LINES = 2
"""Cache lines that a pass prefetches for each pair of inputs: half of a pair of the next panel."""

WEIGHT = np.dtype(
    [
        ("inputs_unpadded", np.int64),
        ("inputs", np.int64),
        ("input_bytes", np.int64),
        ("weight_at", np.int64),
        ("block", np.int64),
        ("group", np.int64),
        ("vectors", np.int64),
        ("scale_row_bytes", np.int64),
        ("scales_at", np.int64),
        ("offsets_at", np.int64),
        ("outputs", np.int64),
        ("bias_at", np.int64),
        ("zero_point", np.float32),
    ]
)
"""A packed weight, an array of one record.

`inputs_unpadded` (K) are padded to `inputs`, and an input takes `input_bytes` of a panel, of `vectors` vectors. The
bias of the `outputs` (N) is padded to whole panels. The rest is for quantized weights: inputs of a block and of a
group, bytes of a panel's scales of one group (0 if all inputs share the scale 1), addresses of scales and of offsets, 0
if there are none, and the zero point.
"""
PRODUCT = numba.int64, None, array_of(WEIGHT), *[numba.int64] * 4
"""Types of the parameters of all kernels of products."""


class Pass:
    """Emits one pass (micro-kernel): some rows times a panel."""

    def __init__(
        self,
        builder: Any,
        rows: int,
        *,
        vectors: int = 4,
        panel_vectors: int = 0,
        float32: bool = False,
    ) -> None:
        """Define a pass.

        Args:
            builder: LLVM builder to emit into.
            rows: Rows of the pass.
            vectors: Vectors of outputs.
            panel_vectors: Vectors of a whole panel, if `panel_at` points into one; default: `vectors`.
            float32: True for float32 rows and widened weights; False for bfloat16 and VDPBF16PS.
        """
        self._builder = builder
        self._writer = InstructionWriter(builder)
        self._rows = rows
        self._vectors = vectors
        self._panel_vectors = panel_vectors or vectors
        self._float32 = float32

    def sums(
        self, rows_at: Any, row_bytes: Any, panel_at: Any, pairs: Any, ahead: Any = None
    ) -> Sequence[Any]:
        """Emit the loop over all pairs of inputs; returns the accumulators, row by row.

        `ahead` is where to prefetch the next weights, and the bytes between the prefetches of two pairs.
        """
        advance = self._writer.advance
        loop = Loop(self._builder, [ZEROS] * (self._rows * self._vectors))
        if ahead is not None:
            at = self._builder.add(ahead[0], self._builder.mul(loop.index, ahead[1]))
            for line in range(_AHEAD_LINES):
                line_at = self._writer.offset(at, line * LINE)
                self._writer.prefetch(line_at, locality=2)
        inputs_at = advance(rows_at, loop.index, 8 if self._float32 else 4)
        places = self._places(panel_at, loop.index)
        add = self._add_float32 if self._float32 else self._add_bf16
        sums: Sequence[Any] = add(loop.carried, inputs_at, row_bytes, places)
        loop.end(sums, pairs)
        return sums

    def _places(self, panel_at: Any, pair: Any) -> Sequence[Any]:
        """Addresses of the weight vectors of a pair of inputs."""
        at = self._writer.advance(panel_at, pair, self._panel_vectors * LINE)
        return [self._writer.offset(at, vector * LINE) for vector in range(self._vectors)]

    def _add_bf16(
        self, sums: Sequence[Any], inputs_at: Any, row_bytes: Any, places: Sequence[Any]
    ) -> Sequence[Any]:
        """Emit the products of one pair of inputs for all rows."""
        writer = self._writer
        weights = [writer.load(at, BF16_PAIRS, LINE) for at in places]
        added = []
        for row in range(self._rows):
            pair = writer.load(writer.advance(inputs_at, row_bytes, row), WORD, 4)
            inputs = self._builder.bitcast(writer.broadcast(pair), BF16_PAIRS)
            of_row = zip(self._of(sums, row), weights, strict=True)
            added += [writer.dot(total, inputs, weight) for total, weight in of_row]
        return added

    def _add_float32(
        self, sums: Sequence[Any], inputs_at: Any, row_bytes: Any, places: Sequence[Any]
    ) -> Sequence[Any]:
        """Emit the same in float32: the first inputs of all pairs, then the second ones."""
        builder, writer = self._builder, self._writer
        words = [writer.load(at, WORDS, LINE) for at in places]
        halves = (
            [builder.shl(each, splat(WORDS, 16)) for each in words],
            [builder.and_(each, splat(WORDS, 0xFFFF0000)) for each in words],
        )
        for place, half in enumerate(halves):
            weights = [builder.bitcast(each, FLOATS) for each in half]
            added = []
            for row in range(self._rows):
                at = writer.advance(inputs_at, row_bytes, row)
                at = writer.offset(at, 4 * place)
                value = writer.broadcast(writer.load(at, ir.FloatType(), 4))
                of_row = zip(self._of(sums, row), weights, strict=True)
                added += [writer.multiply_add(total, value, weight) for total, weight in of_row]
            sums = added
        return sums

    def _of(self, sums: Sequence[Any], row: int) -> Sequence[Any]:
        return sums[row * self._vectors : (row + 1) * self._vectors]

    def store(
        self,
        sums: Sequence[Any],
        out_at: Any,
        out_bytes: Any,
        *,
        bias_at: Any = None,
        float32: bool = False,
    ) -> None:
        """Emit the epilogue: add the optional bias, store as float32 or rounded to bfloat16."""
        builder, writer = self._builder, self._writer
        size = 4 if float32 else 2
        for vector in range(self._vectors):
            bias = None
            if bias_at is not None:
                at = writer.offset(bias_at, vector * LANES * 2)
                bias = builder.fpext(writer.load(at, BF16S), FLOATS)
            for row in range(self._rows):
                total = self._of(sums, row)[vector]
                total = total if bias is None else builder.fadd(total, bias)
                at = writer.advance(out_at, out_bytes, row)
                at = writer.offset(at, vector * LANES * size)
                writer.store(total if float32 else builder.fptrunc(total, BF16S), at)


@emits(numba.void, *[numba.intp] * 10)
def _multiply_pass(
    builder: Any,
    rows: Any,
    rows_at: Any,
    row_bytes: Any,
    panel_at: Any,
    pairs: Any,
    bias_at: Any,
    out_at: Any,
    out_bytes: Any,
    ahead_at: Any,
    ahead_bytes: Any,
) -> None:
    """Multiply 1 to 6 bfloat16 rows by a panel: an unrolled loop for each number of rows."""
    for count in cases(builder, rows, range(1, PASS_ROWS + 1)):
        one = Pass(builder, count)
        sums = one.sums(rows_at, row_bytes, panel_at, pairs, (ahead_at, ahead_bytes))
        one.store(sums, out_at, out_bytes, bias_at=bias_at)


@compiled()
def _multiply_panel(
    rows_at: int, rows: int, pairs: int, panel_at: int, bias_at: int, out_at: int, out_bytes: int
) -> None:
    """Multiply all rows by one panel, in passes of about equal size."""
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    ahead_at, ahead_bytes = panel_at, 0
    if passes > 1:
        ahead_at, ahead_bytes = panel_at + pairs * _PAIR_BYTES, _PAIR_BYTES // passes
    row = 0
    for index in range(passes):
        count = (rows - row) // (passes - index)
        row_at, to_at = rows_at + row * 4 * pairs, out_at + row * out_bytes
        _multiply_pass(
            count,
            row_at,
            4 * pairs,
            panel_at,
            pairs,
            bias_at,
            to_at,
            out_bytes,
            ahead_at,
            ahead_bytes,
        )
        ahead_at += ahead_bytes * pairs
        row += count


@compiled()
def panels_together(rows: int, inputs: int) -> int:
    """Number of panels that a thread claims at once, for M rows of K inputs."""
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    return max(_TOGETHER_PRODUCTS // max(PANEL * inputs * passes, 1), 1)


@compiled()
def _multiply_piece(
    panel: int, rows_at: int, rows: int, weight: Any, outputs: int, out_at: int
) -> None:
    """Multiply all rows by a panel, without the padding of the last one."""
    pairs, column, out_bytes = weight[0].inputs_unpadded // 2, panel * PANEL, 2 * outputs
    panel_at = weight[0].weight_at + panel * pairs * _PAIR_BYTES
    bias_at, at = weight[0].bias_at + 2 * column, out_at + 2 * column
    if column + PANEL <= outputs:
        _multiply_panel(rows_at, rows, pairs, panel_at, bias_at, at, out_bytes)
        return
    part = np.empty((rows, PANEL), dtype=np.uint16)
    _multiply_panel(rows_at, rows, pairs, panel_at, bias_at, part.ctypes.data, 2 * PANEL)
    for row in range(rows):
        copy(part[row].ctypes.data, at + row * out_bytes, outputs - column)


@kernel(*PRODUCT)
def multiply(
    pool: int, _tags: Any, weight: Any, rows_at: int, rows: int, outputs: int, out_at: int
) -> None:
    """Multiply bfloat16 rows by a weight in panels, on the threads of a pool (`thread_pool.spread`).

    Shape: rows [rows, inputs]; weight `WEIGHT` [1], with a bfloat16 bias; out [rows, outputs]. `outputs` are those of
    the weight, or fewer while memory is measured.
    """
    panels = (outputs + PANEL - 1) // PANEL
    arguments = rows_at, rows, weight, outputs, out_at
    spread(
        pool, panels, panels_together(rows, weight[0].inputs_unpadded), _multiply_piece, arguments
    )
