"""The product of bfloat16 rows and a packed weight (GEMM), which prefetches the next weights while it multiplies.

    out[r, o] = bias[o] + sum_i rows[r, i] * weight[o, i]      (sums float32, result rounded)

**Layout.** A weight [out, in] lies in panels of 64 outputs, in which two neighbouring inputs lie together:
[out / 64, in / 2, 64, 2]. That is what VDPBF16PS (`simd.py`) takes, and how oneDNN packs weights. The weight and the
bias are padded to whole panels.

**Blocking.** A pass multiplies up to 6 rows with a panel: 6 x 4 vectors of sums stay in registers while all inputs are
walked, beside 4 vectors of weights and one broadcast input. oneDNN takes rows a few at a time, too: its first pass
waits for a panel to come from memory, and the others find it in the cache, so that a step of a large model takes the
time of reading plus that of multiplying. Here each pass over a panel prefetches a part of the next panel.

**Operands.** Some processors multiply float32 faster than VDPBF16PS multiplies bfloat16. There rows are widened first,
and weights in registers: a product of two bfloat16 is exact in float32, and only the order of the sums differs.

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

from vsched_workers.backends.cpu.kernels.bf16 import as_type_of, bf16_array, widen
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits
from vsched_workers.backends.cpu.kernels.simd import (
    BF16_PAIRS,
    BF16S,
    FLOATS,
    LANES,
    LINE,
    LONG,
    WORD,
    WORDS,
    ZEROS,
    InstructionWriter,
    Loop,
    cases,
)
from vsched_workers.backends.cpu.kernels.thread_pool import spread

PANEL = 64
"""Outputs of a panel."""
PASS_ROWS = 6
"""Most rows of a pass: their sums, four vectors each, leave registers for four weights and one input."""
OWN_ROWS_MAX = 16
"""Most rows that the calling thread reads by itself: to wake the others for that takes longer."""
_TOGETHER_PRODUCTS = 1 << 17
"""Products of a pass and panels that a thread takes at once: some 10 microseconds, or reading 256 KiB."""
_PAIR_BYTES = PANEL * 2 * 2
"""Bytes of two neighbouring inputs in a panel."""
_PREFETCHED_LINES = (0, 1, 2, 4)
"""Lines that a pass may prefetch for each pair of inputs; four are the whole next panel."""


class Pass:
    """Writes one pass: some rows times a panel of some vectors."""

    def __init__(
        self,
        builder: Any,
        rows: int,
        *,
        lines: int = 0,
        vectors: int = 4,
        panel_vectors: int = 0,
        float32: bool = False,
    ) -> None:
        """Describe a pass.

        Args:
            builder: Where to write it.
            rows: Rows of it.
            lines: Lines of memory to prefetch for each pair of inputs.
            vectors: Vectors of outputs.
            panel_vectors: Vectors of outputs of the panel, of which those at `panel_at` are taken; else as many.
            float32: Whether rows are float32 and weights are widened; else both are bfloat16, and VDPBF16PS is used.
        """
        self._builder = builder
        self._writer = InstructionWriter(builder)
        self._rows = rows
        self._lines = lines
        self._vectors = vectors
        self._panel_vectors = panel_vectors or vectors
        self._float32 = float32

    def sums(
        self, rows_at: Any, row_bytes: Any, panel_at: Any, pairs: Any, next_at: Any = None
    ) -> Sequence[Any]:
        """Write the loop over all pairs of inputs; returns the sums, a row's behind those of the row before."""
        advance = self._writer.advance
        loop = Loop(self._builder, [ZEROS] * (self._rows * self._vectors))
        inputs_at = advance(rows_at, loop.index, 8 if self._float32 else 4)
        places = self._places(panel_at, loop.index)
        add = self._add_float32 if self._float32 else self._add_bf16
        sums: Sequence[Any] = add(loop.carried, inputs_at, row_bytes, places)
        for line in range(self._lines):
            at = advance(next_at, loop.index, self._lines * LINE, line * LINE)
            self._writer.prefetch(at, locality=2)
        loop.end(sums, pairs)
        return sums

    def _places(self, panel_at: Any, pair: Any) -> Sequence[Any]:
        """Return the addresses of the vectors of weights of a pair of inputs."""
        return self._vectors_at(panel_at, pair, self._vectors, self._panel_vectors)

    def _vectors_at(self, start: Any, pair: Any, count: int, apart: int) -> list[Any]:
        """Return the addresses of some vectors of a pair; a pair's lie so many vectors behind the pair's before."""
        at = self._writer.advance(start, pair, apart * LINE)
        one = ir.Constant(LONG, 1)
        return [self._writer.advance(at, one, vector * LINE) for vector in range(count)]

    def _add_bf16(
        self, sums: Sequence[Any], inputs_at: Any, row_bytes: Any, places: Sequence[Any]
    ) -> Sequence[Any]:
        """Add the products of one pair of inputs to the sums of all rows."""
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
        """Do the same in float32: first the lower ones of all pairs, then the upper ones."""
        builder, writer = self._builder, self._writer
        words = [writer.load(at, WORDS, LINE) for at in places]
        upper = ir.Constant(WORDS, [0xFFFF0000] * LANES)
        sixteen = ir.Constant(WORDS, [16] * LANES)
        halves = (
            [builder.shl(each, sixteen) for each in words],
            [builder.and_(each, upper) for each in words],
        )
        for place, half in enumerate(halves):
            weights = [builder.bitcast(each, FLOATS) for each in half]
            added = []
            for row in range(self._rows):
                at = writer.advance(inputs_at, row_bytes, row)
                at = builder.add(at, ir.Constant(LONG, 4 * place))
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
        """Add the bias, if there is one, to the sums, and write them: as float32, or else rounded to bfloat16."""
        builder, writer = self._builder, self._writer
        size = 4 if float32 else 2
        for vector in range(self._vectors):
            bias = None
            if bias_at is not None:
                at = builder.add(bias_at, ir.Constant(LONG, vector * LANES * 2))
                bias = builder.fpext(writer.load(at, BF16S), FLOATS)
            for row in range(self._rows):
                total = self._of(sums, row)[vector]
                total = total if bias is None else builder.fadd(total, bias)
                at = writer.advance(out_at, out_bytes, row)
                at = builder.add(at, ir.Constant(LONG, vector * LANES * size))
                writer.store(total if float32 else builder.fptrunc(total, BF16S), at)


@emits(numba.void, None, *[numba.intp] * 10)
def _multiply_pass(
    builder: Any,
    kind: Any,
    rows: Any,
    lines: Any,
    rows_at: Any,
    row_bytes: Any,
    panel_at: Any,
    pairs: Any,
    next_at: Any,
    bias_at: Any,
    out_at: Any,
    out_bytes: Any,
) -> None:
    """Multiply 1 to 6 rows, of the type of `kind`, with a panel, and prefetch lines of the next panel."""
    # A case's number has the lines in its lower three bits, and the rows above them.
    number = builder.add(builder.mul(rows, ir.Constant(LONG, 8)), lines)
    numbers = [8 * row + line for row in range(1, PASS_ROWS + 1) for line in _PREFETCHED_LINES]
    for case in cases(builder, number, numbers):
        float32 = isinstance(kind, numba.types.Float)
        one = Pass(builder, case // 8, lines=case % 8, float32=float32)
        sums = one.sums(rows_at, row_bytes, panel_at, pairs, next_at)
        one.store(sums, out_at, out_bytes, bias_at=bias_at)


@compiled()
def _multiply_panel(
    inputs: Any,
    panel_at: int,
    bias_at: int,
    out_at: int,
    out_bytes: int,
    has_next: int,
) -> None:
    """Multiply all rows with one panel, in passes of about as many rows, and prefetch the next panel, if any."""
    rows, pairs = len(inputs), inputs.shape[1] // 2
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    lines = 4 if passes == 1 else 2 if passes < 4 else 1
    row = 0
    for index in range(passes):
        count = (rows - row) // (passes - index)
        fetched = lines if has_next and index * lines < 4 else 0
        _multiply_pass(
            inputs[0, 0],
            count,
            fetched,
            inputs[row].ctypes.data,
            inputs.strides[0],
            panel_at,
            pairs,
            panel_at + pairs * (_PAIR_BYTES + index * fetched * LINE),
            bias_at,
            out_at + row * out_bytes,
            out_bytes,
        )
        row += count


@compiled()
def panels_together(rows: int, inputs: int) -> int:
    """Return the number of panels that a thread multiplies at once, with rows of so many inputs."""
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    return max(_TOGETHER_PRODUCTS // max(PANEL * inputs * passes, 1), 1)


@compiled()
def _multiply_panels(
    first: int,
    stop: int,
    inputs: Any,
    weight_at: int,
    outputs: int,
    bias_at: int,
    out_at: int,
) -> None:
    """Multiply all rows with the panels `first` to `stop`; the padding of the last panel of all is left out."""
    out_bytes = 2 * outputs
    last = (outputs - 1) // PANEL
    for panel in range(first, stop):
        panel_at = weight_at + panel * inputs.shape[1] * _PAIR_BYTES // 2
        column = panel * PANEL
        has_next = panel < last
        at = out_at + 2 * column
        if column + PANEL <= outputs:
            _multiply_panel(inputs, panel_at, bias_at + 2 * column, at, out_bytes, has_next)
            continue
        part = np.empty((len(inputs), PANEL), dtype=np.uint16)
        part_at, part_bytes = part.ctypes.data, 2 * PANEL
        _multiply_panel(inputs, panel_at, bias_at + 2 * column, part_at, part_bytes, has_next)
        for row in range(len(inputs)):
            target, source = bf16_array(at + row * out_bytes, outputs - column), part[row]
            for index in range(len(target)):
                target[index] = source[index]


@compiled()
def read_row(row_at: int, inputs: Any) -> None:
    """Write a row of bfloat16 in the type of the inputs."""
    given = bf16_array(row_at, len(inputs))
    for index in range(len(inputs)):
        inputs[index] = as_type_of(inputs[0], widen(given[index]))


@compiled()
def _read_rows(first: int, stop: int, rows_at: int, inputs: Any) -> None:
    for row in range(first, stop):
        read_row(rows_at + row * inputs.shape[1] * 2, inputs[row])


# Flat arguments: a step of a small model spends a few microseconds on a product, 2 to 5 % of which a record would be.
@compiled()
def multiply(
    pool: int,
    tag: Any,
    rows_at: int,
    rows: int,
    pairs: int,
    weight_at: int,
    outputs: int,
    bias_at: int,
    out_at: int,
) -> None:
    """Multiply rows by a weight in panels, on the threads of a pool (`thread_pool.spread`).

    Shape: rows [rows, 2 * pairs]; weight and bias as the head of this file says; out [rows, outputs].
    `tag` is the dtype tag of the operands.
    """
    inputs = np.empty((rows, 2 * pairs), dtype=tag.dtype)
    spread(pool, rows, OWN_ROWS_MAX, _read_rows, (rows_at, inputs))
    panels = (outputs + PANEL - 1) // PANEL
    given = inputs, weight_at, outputs, bias_at, out_at
    spread(pool, panels, panels_together(rows, 2 * pairs), _multiply_panels, given)


# --- what is timed to choose the operands (`operand_choice.py`) ---


@emits(numba.void, None, *[numba.intp] * 6)
def _timed_pass(
    builder: Any,
    kind: Any,
    rows_at: Any,
    row_bytes: Any,
    panel_at: Any,
    pairs: Any,
    out_at: Any,
    out_bytes: Any,
) -> None:
    """Multiply six rows, of the type of `kind`, with a panel."""
    one = Pass(builder, PASS_ROWS, float32=isinstance(kind, numba.types.Float))
    one.store(one.sums(rows_at, row_bytes, panel_at, pairs), out_at, out_bytes)


@compiled()
def repeat_pass(
    kind: Any,
    repeats: int,
    rows_at: int,
    row_bytes: int,
    panel_at: int,
    pairs: int,
    out_at: int,
    out_bytes: int,
) -> None:
    """Multiply six rows with a panel again and again; rows lie `row_bytes` apart, results `out_bytes`."""
    for _ in range(repeats):
        _timed_pass(kind, rows_at, row_bytes, panel_at, pairs, out_at, out_bytes)
