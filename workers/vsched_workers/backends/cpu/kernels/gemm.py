"""The product of rows and a packed weight in bfloat16, which reads the next weights while it multiplies.

A weight [out, in] lies in panels of 64 outputs, in which what belongs to two inputs lies together: [out / 64, in / 2,
64, 2]. That is how oneDNN packs it, too. It takes the rows a few at a time: the first few wait for a panel to come from
memory, and the others find it in the cache, so that a step of a large model takes the time of reading and that of
multiplying, one after the other. Here each pass of rows over a panel fetches a part of the panel after it.

The processor's own instruction multiplies (see `kernels/vectors.py`): pairs of bfloat16, added up in float32. Some
processors multiply float32 faster than that. There rows are widened first, and weights in registers: the products are
the same, which float32 holds exactly, and only the order of the sums differs.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.elementwise import halves
from vsched_workers.backends.cpu.kernels.numba_basics import as_float, as_kind, compiled
from vsched_workers.backends.cpu.kernels.vectors import (
    HALVES,
    LANES,
    LINE,
    LONG,
    NOTHING,
    PAIRS,
    SINGLES,
    WORD,
    WORDS,
    Loop,
    Writer,
)

PANEL = 64
"""Outputs of a panel."""
PASS_ROWS = 6
"""Rows of a pass: their sums, four vectors each, fill the registers but for those of four weights and one input."""
_PAIR = PANEL * 2 * 2
"""Bytes of a pair of inputs in a panel."""


class Pass:
    """Writes one pass: rows times a panel of so many vectors, and so many lines fetched for each pair of inputs.

    Rows are bfloat16, and multiplied by pairs, or `single`, and multiplied one by one in float32.
    """

    def __init__(
        self, builder: Any, rows: int, *, lines: int = 0, vectors: int = 4, single: bool = False
    ) -> None:
        self._builder = builder
        self._writer = Writer(builder)
        self._rows = rows
        self._lines = lines
        self._vectors = vectors
        self._single = single

    def sums(
        self, rows_at: Any, row_bytes: Any, panel_at: Any, pairs: Any, ahead_at: Any = None
    ) -> Sequence[Any]:
        """Write it where the builder is, and leave that at the end of it; returns the sums of each row."""
        moved = self._writer.moved
        loop = Loop(self._builder, [NOTHING] * (self._rows * self._vectors))
        inputs_at = moved(rows_at, loop.index, 8 if self._single else 4)
        weights_at = moved(panel_at, loop.index, self._vectors * LINE)
        add = self._add_singles if self._single else self._add_pairs
        sums: Sequence[Any] = add(loop.carried, inputs_at, row_bytes, weights_at)
        for line in range(self._lines):
            self._writer.fetch(moved(ahead_at, loop.index, self._lines * LINE, line * LINE))
        loop.end(sums, pairs)
        return sums

    def _add_pairs(self, sums: Any, inputs_at: Any, row_bytes: Any, panel_at: Any) -> list[Any]:
        """Add the products of one pair of inputs to the sums of all rows, a row's behind those of the one before."""
        writer = self._writer
        weights = self._weights(panel_at, PAIRS)
        added = []
        for row in range(self._rows):
            word = writer.load(writer.moved(inputs_at, row_bytes, row), WORD, 4)
            inputs = self._builder.bitcast(writer.repeated(word), PAIRS)
            pairs = zip(self._of(sums, row), weights, strict=True)
            added += [writer.multiply(total, inputs, each) for total, each in pairs]
        return added

    def _add_singles(
        self, sums: Sequence[Any], inputs_at: Any, row_bytes: Any, panel_at: Any
    ) -> Sequence[Any]:
        """Do the same in float32: first the lower ones of all pairs, then the upper ones."""
        builder, writer = self._builder, self._writer
        words = self._weights(panel_at, WORDS)
        upper = ir.Constant(WORDS, [0xFFFF0000] * LANES)
        sixteen = ir.Constant(WORDS, [16] * LANES)
        halves = (
            [builder.shl(each, sixteen) for each in words],
            [builder.and_(each, upper) for each in words],
        )
        for place, half in enumerate(halves):
            weights = [builder.bitcast(each, SINGLES) for each in half]
            added = []
            for row in range(self._rows):
                at = writer.moved(inputs_at, row_bytes, row)
                at = builder.add(at, ir.Constant(LONG, 4 * place))
                value = writer.repeated(writer.load(at, ir.FloatType(), 4))
                for total, weight in zip(self._of(sums, row), weights, strict=True):
                    product = builder.fmul(value, weight, flags=("contract",))
                    added.append(builder.fadd(total, product, flags=("contract",)))
            sums = added
        return sums

    def _weights(self, panel_at: Any, kind: Any) -> list[Any]:
        at = self._writer.moved
        one = ir.Constant(LONG, 1)
        vectors = range(self._vectors)
        return [
            self._writer.load(at(panel_at, one, vector * LINE), kind, LINE) for vector in vectors
        ]

    def _of(self, sums: Sequence[Any], row: int) -> Sequence[Any]:
        return sums[row * self._vectors : (row + 1) * self._vectors]

    def store(
        self,
        sums: Sequence[Any],
        out_at: Any,
        out_bytes: Any,
        *,
        bias_at: Any = None,
        single: bool = False,
    ) -> None:
        """Add the bias, if there is one, to the sums and write them: rounded, or `single` as they are."""
        builder, writer = self._builder, self._writer
        size = 4 if single else 2
        for vector in range(self._vectors):
            bias = None
            if bias_at is not None:
                at = builder.add(bias_at, ir.Constant(LONG, vector * LANES * 2))
                bias = builder.fpext(writer.load(at, HALVES), SINGLES)
            for row in range(self._rows):
                whole = self._of(sums, row)[vector]
                whole = whole if bias is None else builder.fadd(whole, bias)
                at = writer.moved(out_at, out_bytes, row)
                at = builder.add(at, ir.Constant(LONG, vector * LANES * size))
                writer.store(whole if single else builder.fptrunc(whole, HALVES), at)


def _passing(
    _context: Any,
    kind: Any,
    _rows: Any,
    _lines: Any,
    _rows_at: Any,
    _row_bytes: Any,
    _panel_at: Any,
    _pairs: Any,
    _ahead_at: Any,
    _bias_at: Any,
    _out_at: Any,
    _out_bytes: Any,
) -> Any:
    """Multiply 1 to 6 rows with a panel, fetching 0, 1, 2 or 4 lines of what lies ahead for each pair of inputs.

    Rows are of the type that `kind` is of: float32, or uint16 for bfloat16.
    """
    single = isinstance(kind, numba.types.Float)

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, rows, lines, rows_at, row_bytes, panel_at, pairs, *others = arguments
        ahead_at, bias_at, *out = others
        end = builder.append_basic_block("end")
        # The number of a pass: its lines in the lower three bits, its rows above.
        number = builder.add(builder.mul(rows, ir.Constant(LONG, 8)), lines)
        switch = builder.switch(number, end)
        for row_count in range(1, PASS_ROWS + 1):
            for line_count in (0, 1, 2, 4):
                block = builder.append_basic_block("pass")
                switch.add_case(ir.Constant(LONG, row_count * 8 + line_count), block)
                builder.position_at_end(block)
                one = Pass(builder, row_count, lines=line_count, single=single)
                one.store(
                    one.sums(rows_at, row_bytes, panel_at, pairs, ahead_at), *out, bias_at=bias_at
                )
                builder.branch(end)
        builder.position_at_end(end)

    return numba.void(kind, *[numba.intp] * 10), make


_multiply_pass: Any = numba.extending.intrinsic(_passing)


@compiled()
def _multiply_panel(
    inputs: Any, panel_at: int, bias_at: int, out_at: int, out_bytes: int, fetches: int
) -> None:
    """Multiply all rows with one panel, in passes of about as many rows, and fetch the next panel if there is one."""
    rows, pairs = len(inputs), inputs.shape[1] // 2
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    lines = 4 if passes == 1 else 2 if passes < 4 else 1
    row = 0
    for index in range(passes):
        count = (rows - row) // (passes - index)
        fetched = lines if fetches and index * lines < 4 else 0
        _multiply_pass(
            inputs[0, 0],
            count,
            fetched,
            inputs[row].ctypes.data,
            inputs.strides[0],
            panel_at,
            pairs,
            panel_at + pairs * (_PAIR + index * fetched * LINE),
            bias_at,
            out_at + row * out_bytes,
            out_bytes,
        )
        row += count


@compiled()
def _multiply_panels(
    first: int, stop: int, inputs: Any, weight_at: int, outputs: int, bias_at: int, out_at: int
) -> None:
    """Multiply all rows with some panels; of the last panel of all, only so many outputs count that there are."""
    out_bytes = 2 * outputs
    for panel in range(first, stop):
        panel_at = weight_at + panel * inputs.shape[1] * _PAIR // 2
        column = panel * PANEL
        fetches = panel + 1 < stop
        at = out_at + 2 * column
        if column + PANEL <= outputs:
            _multiply_panel(inputs, panel_at, bias_at + 2 * column, at, out_bytes, fetches)
            continue
        part = np.empty((len(inputs), PANEL), dtype=np.uint16)
        part_at, part_bytes = part.ctypes.data, 2 * PANEL
        _multiply_panel(inputs, panel_at, bias_at + 2 * column, part_at, part_bytes, fetches)
        for row in range(len(inputs)):
            target, source = halves(at + row * out_bytes, outputs - column), part[row]
            for index in range(len(target)):
                target[index] = source[index]


@compiled()
def take(row_at: int, inputs: Any) -> None:
    """Write a row of bfloat16 in the type of the inputs."""
    given = halves(row_at, len(inputs))
    for index in range(len(inputs)):
        inputs[index] = as_kind(inputs[0], as_float(given[index]))


@compiled()
def multiply(
    like: Any,
    rows_at: int,
    rows: int,
    pairs: int,
    weight_at: int,
    outputs: int,
    bias_at: int,
    out_at: int,
) -> None:
    """Write the products of rows [rows, 2 * pairs] and a weight of so many outputs, and the bias, to [rows, outputs].

    `like` is an array of the type that is multiplied: float32, or uint16 for pairs of bfloat16. Weight and bias are
    filled up to whole panels.
    """
    inputs = np.empty((rows, 2 * pairs), dtype=like.dtype)
    for row in range(rows):
        take(rows_at + row * pairs * 4, inputs[row])
    panels = (outputs + PANEL - 1) // PANEL
    _multiply_panels(0, panels, inputs, weight_at, outputs, bias_at, out_at)


@compiled(parallel=True)
def multiply_parallel(
    threads: int,
    like: Any,
    rows_at: int,
    rows: int,
    pairs: int,
    weight_at: int,
    outputs: int,
    bias_at: int,
    out_at: int,
) -> None:
    """Do as `multiply` does on so many threads, each of which has neighbouring panels."""
    inputs = np.empty((rows, 2 * pairs), dtype=like.dtype)
    for row in numba.prange(rows):
        take(rows_at + row * pairs * 4, inputs[row])
    panels = (outputs + PANEL - 1) // PANEL
    for thread in numba.prange(threads):
        first, stop = panels * thread // threads, panels * (thread + 1) // threads
        _multiply_panels(first, stop, inputs, weight_at, outputs, bias_at, out_at)
