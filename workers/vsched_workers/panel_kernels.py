"""The product of few rows and a packed weight in bfloat16, which reads the next weights while it multiplies.

oneDNN keeps a weight [out, in] as panels of 64 outputs, in which what belongs to two inputs lies together: [out / 64,
in / 2, 64, 2]. It takes the rows a few at a time: the first few wait for a panel to come from memory, and the others
find it in the cache, so that a step of a large model takes the time of reading and that of multiplying, one after the
other. Here each pass of rows over a panel fetches a part of the panel after it.

The processor's own instruction multiplies (see `numba_vectors.py`): pairs of bfloat16, added up in float32.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.numba_basics import compiled
from vsched_workers.numba_vectors import (
    HALVES,
    LANES,
    LINE,
    LONG,
    NOTHING,
    PAIRS,
    SINGLES,
    WORD,
    Loop,
    Writer,
)

PANEL = 64
"""Outputs of a panel."""
PASS_ROWS = 6
"""Rows of a pass: their sums, four vectors each, fill the registers but for those of four weights and one input."""
_VECTORS = 4
_PAIR = PANEL * 2 * 2
"""Bytes of a pair of inputs in a panel."""


class Pass:
    """Writes one pass: rows times a panel of so many vectors, and so many lines fetched for each pair of inputs."""

    def __init__(self, builder: Any, rows: int, lines: int = 0, vectors: int = _VECTORS) -> None:
        self._builder = builder
        self._writer = Writer(builder)
        self._rows = rows
        self._lines = lines
        self._vectors = vectors

    def write(
        self,
        rows_at: Any,
        row_bytes: Any,
        panel_at: Any,
        pairs: Any,
        out_at: Any,
        out_bytes: Any,
        *,
        bias_at: Any = None,
        ahead_at: Any = None,
    ) -> None:
        """Write it where the builder is, and leave that at the end of it."""
        moved = self._writer.moved
        loop = Loop(self._builder, [NOTHING] * (self._rows * self._vectors))
        inputs_at = moved(rows_at, loop.index, 4)
        weights_at = moved(panel_at, loop.index, self._vectors * LINE)
        sums = self._pair(loop.carried, inputs_at, row_bytes, weights_at)
        for line in range(self._lines):
            self._writer.fetch(moved(ahead_at, loop.index, self._lines * LINE, line * LINE))
        loop.end(sums, pairs)
        self._store(sums, bias_at, out_at, out_bytes)

    def _pair(self, sums: Any, inputs_at: Any, row_bytes: Any, panel_at: Any) -> Any:
        """Add the products of one pair of inputs to the sums of all rows, a row's behind those of the one before."""
        writer, one = self._writer, ir.Constant(LONG, 1)
        weights = [
            writer.load(writer.moved(panel_at, one, vector * LINE), PAIRS, LINE)
            for vector in range(self._vectors)
        ]
        added = []
        for row in range(self._rows):
            word = writer.load(writer.moved(inputs_at, row_bytes, row), WORD, 4)
            inputs = self._builder.bitcast(writer.repeated(word), PAIRS)
            totals = sums[row * self._vectors : (row + 1) * self._vectors]
            pairs = zip(totals, weights, strict=True)
            added += [writer.multiply(total, inputs, each) for total, each in pairs]
        return added

    def _store(self, sums: Any, bias_at: Any, out_at: Any, out_bytes: Any) -> None:
        """Add the bias to the sums if there is one, round them, and write them."""
        builder, writer = self._builder, self._writer
        for vector in range(self._vectors):
            offset = ir.Constant(LONG, vector * LANES * 2)
            bias = NOTHING
            if bias_at is not None:
                bias = builder.fpext(writer.load(builder.add(bias_at, offset), HALVES), SINGLES)
            for row in range(self._rows):
                whole = sums[row * self._vectors + vector]
                if bias_at is not None:
                    whole = builder.fadd(whole, bias)
                at = builder.add(writer.moved(out_at, out_bytes, row), offset)
                writer.store(builder.fptrunc(whole, HALVES), at)


def _passing(
    _context: Any,
    _rows: Any,
    _lines: Any,
    _rows_at: Any,
    _row_bytes: Any,
    _panel_at: Any,
    _pairs: Any,
    _out_at: Any,
    _out_bytes: Any,
    _bias_at: Any,
    _ahead_at: Any,
) -> Any:
    """Multiply 1 to 6 rows with a panel, fetching 0, 1, 2 or 4 lines of what lies ahead for each pair of inputs."""

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, lines, *others, bias_at, ahead_at = arguments
        end = builder.append_basic_block("end")
        # The number of a pass: its lines in the lower three bits, its rows above.
        number = builder.add(builder.mul(rows, ir.Constant(LONG, 8)), lines)
        switch = builder.switch(number, end)
        for row_count in range(1, PASS_ROWS + 1):
            for line_count in (0, 1, 2, 4):
                block = builder.append_basic_block("pass")
                switch.add_case(ir.Constant(LONG, row_count * 8 + line_count), block)
                builder.position_at_end(block)
                one = Pass(builder, row_count, line_count)
                one.write(*others, bias_at=bias_at, ahead_at=ahead_at)
                builder.branch(end)
        builder.position_at_end(end)

    return numba.void(*[numba.intp] * 10), make


_multiply_pass: Any = numba.extending.intrinsic(_passing)


@compiled()
def _multiply_panel(
    rows_at: int,
    rows: int,
    pairs: int,
    panel_at: int,
    bias_at: int,
    out_at: int,
    out_bytes: int,
    fetches: int,
) -> None:
    """Multiply all rows with one panel, in passes of about as many rows, and fetch the next panel if there is one."""
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    lines = 4 if passes == 1 else 2 if passes < 4 else 1
    row = 0
    for index in range(passes):
        count = (rows - row) // (passes - index)
        fetched = lines if fetches and index * lines < 4 else 0
        _multiply_pass(
            count,
            fetched,
            rows_at + row * pairs * 4,
            pairs * 4,
            panel_at,
            pairs,
            out_at + row * out_bytes,
            out_bytes,
            bias_at,
            panel_at + pairs * (_PAIR + index * fetched * LINE),
        )
        row += count


@compiled()
def _multiply_panels(
    first: int,
    stop: int,
    rows_at: int,
    rows: int,
    pairs: int,
    weight_at: int,
    bias_at: int,
    out_at: int,
    out_bytes: int,
) -> None:
    for panel in range(first, stop):
        _multiply_panel(
            rows_at,
            rows,
            pairs,
            weight_at + panel * pairs * _PAIR,
            bias_at + panel * PANEL * 2,
            out_at + panel * PANEL * 2,
            out_bytes,
            panel + 1 < stop,
        )


@compiled()
def multiply(
    rows_at: int, rows: int, pairs: int, weight_at: int, panels: int, bias_at: int, out_at: int
) -> None:
    """Write the products of rows [rows, 2 * pairs] and a weight of so many panels, and the bias, to [rows, out]."""
    out_bytes = panels * PANEL * 2
    _multiply_panels(0, panels, rows_at, rows, pairs, weight_at, bias_at, out_at, out_bytes)


@compiled(parallel=True)
def multiply_parallel(
    rows_at: int,
    rows: int,
    pairs: int,
    weight_at: int,
    panels: int,
    bias_at: int,
    out_at: int,
    threads: int,
) -> None:
    """Do as `multiply` does on so many threads, each of which has neighbouring panels."""
    out_bytes = panels * PANEL * 2
    for thread in numba.prange(threads):
        first, stop = panels * thread // threads, panels * (thread + 1) // threads
        _multiply_panels(first, stop, rows_at, rows, pairs, weight_at, bias_at, out_at, out_bytes)
