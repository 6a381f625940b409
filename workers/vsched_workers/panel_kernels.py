"""The product of few rows and a packed weight in bfloat16, which reads the next weights while it multiplies.

oneDNN keeps a weight [out, in] as panels of 64 outputs, in which what belongs to two inputs lies together: [out / 64,
in / 2, 64, 2]. It takes the rows a few at a time: the first few wait for a panel to come from memory, and the others
find it in the cache, so that a step of a large model takes the time of reading and that of multiplying, one after the
other. Here each pass of rows over a panel fetches a part of the panel after it.

The processor's own instruction multiplies: pairs of bfloat16, added up in float32. numba does not know it, nor vectors;
so a pass is written for the compiler below it.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numba
from llvmlite import binding, ir  # type: ignore[import-untyped]

from vsched_workers.numba_basics import compiled

PANEL = 64
"""Outputs of a panel."""
PASS_ROWS = 6
"""Rows of a pass: their sums, four vectors each, fill the registers but for those of four weights and one input."""
_VECTORS = 4
_LANES = 16
_LINE = 64
_PAIR_BYTES = PANEL * 2 * 2


class _BrainFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat16, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BrainFloat)

    def __hash__(self) -> int:
        return hash(_BrainFloat)


_WORD, _BYTE, _LONG = ir.IntType(32), ir.IntType(8), ir.IntType(64)
_SINGLES = ir.VectorType(ir.FloatType(), _LANES)
_PAIRS = ir.VectorType(_BrainFloat(), 2 * _LANES)
_WORDS = ir.VectorType(_WORD, _LANES)
_HALVES = ir.VectorType(_BrainFloat(), _LANES)


def can_multiply() -> bool:
    """Return whether this processor has the instruction, and numba compiles for this processor."""
    limits: Any = numba.config
    chosen = limits.CPU_NAME or limits.CPU_FEATURES
    return not chosen and bool(binding.get_host_cpu_features().get("avx512bf16"))


class _Pass:
    """Writes one pass: so many rows, and so many lines fetched for each pair of inputs."""

    def __init__(self, builder: Any, rows: int, lines: int) -> None:
        self._builder = builder
        self._rows = rows
        self._lines = lines

    def write(self, arguments: Any) -> None:
        """Write it where the builder is, and leave that at the end of it."""
        rows_at, row_bytes, panel_at, pairs, bias_at, out_at, out_bytes, ahead_at = arguments
        builder = self._builder
        before = builder.block
        loop, done = (builder.append_basic_block(name) for name in ("pairs", "sums"))
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(_LONG)
        sums = [[builder.phi(_SINGLES) for _ in range(_VECTORS)] for _ in range(self._rows)]
        added = self._pair(index, sums, rows_at, row_bytes, panel_at)
        for line in range(self._lines):
            self._fetch(self._moved(ahead_at, index, self._lines * _LINE, line * _LINE))
        following = builder.add(index, ir.Constant(_LONG, 1))
        self._continue(index, ir.Constant(_LONG, 0), before, following, loop)
        for row, row_added in zip(sums, added, strict=True):
            for vector, vector_added in zip(row, row_added, strict=True):
                self._continue(vector, ir.Constant(_SINGLES, None), before, vector_added, loop)
        builder.cbranch(builder.icmp_signed("<", following, pairs), loop, done)
        builder.position_at_end(done)
        self._store(added, bias_at, out_at, out_bytes)

    @staticmethod
    def _continue(phi: Any, first: Any, before: Any, later: Any, loop: Any) -> None:
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)

    def _pair(self, index: Any, sums: Any, rows_at: Any, row_bytes: Any, panel_at: Any) -> Any:
        """Add the products of one pair of inputs to the sums of all rows; return the new ones."""
        builder = self._builder
        weights = [
            self._load(self._moved(panel_at, index, _PAIR_BYTES, vector * _LINE), _PAIRS, _LINE)
            for vector in range(_VECTORS)
        ]
        declared = ir.FunctionType(_SINGLES, [_SINGLES, _PAIRS, _PAIRS])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        multiply = builder.module.globals.get(name) or ir.Function(builder.module, declared, name)
        inputs_at = self._moved(rows_at, index, 4, 0)
        added = []
        for row, row_sums in enumerate(sums):
            word = self._load(self._moved(inputs_at, row_bytes, row, 0), _WORD, 4)
            inputs = builder.bitcast(self._repeated(word), _PAIRS)
            pairs = zip(row_sums, weights, strict=True)
            added.append([builder.call(multiply, [total, inputs, each]) for total, each in pairs])
        return added

    def _store(self, sums: Any, bias_at: Any, out_at: Any, out_bytes: Any) -> None:
        """Add the bias to the sums, round them, and write them."""
        builder = self._builder
        for vector in range(_VECTORS):
            offset = vector * _LANES * 2
            at = builder.add(bias_at, ir.Constant(_LONG, offset))
            bias = builder.fpext(self._load(at, _HALVES, 2), _SINGLES)
            for row, row_sums in enumerate(sums):
                rounded = builder.fptrunc(builder.fadd(row_sums[vector], bias), _HALVES)
                at = self._moved(out_at, out_bytes, row, offset)
                builder.store(rounded, builder.inttoptr(at, _HALVES.as_pointer()), align=2)

    def _fetch(self, at: Any) -> None:
        """Have a line of memory brought into the second cache; it is read a panel later."""
        pointer = _BYTE.as_pointer()
        declared = ir.FunctionType(ir.VoidType(), [pointer, _WORD, _WORD, _WORD])
        fetch = self._builder.module.declare_intrinsic("llvm.prefetch", [pointer], declared)
        options = [ir.Constant(_WORD, value) for value in (0, 2, 1)]
        self._builder.call(fetch, [self._builder.inttoptr(at, pointer), *options])

    def _repeated(self, word: Any) -> Any:
        """Return a vector of the same word everywhere."""
        builder, nothing = self._builder, ir.Constant(_WORDS, ir.Undefined)
        first = builder.insert_element(nothing, word, ir.Constant(_WORD, 0))
        return builder.shuffle_vector(first, nothing, ir.Constant(_WORDS, None))

    def _moved(self, at: Any, count: Any, size: int, offset: int) -> Any:
        """Return an address that lies `count` times `size` bytes, and some, further."""
        builder = self._builder
        further = builder.mul(count, ir.Constant(_LONG, size))
        return builder.add(builder.add(at, further), ir.Constant(_LONG, offset))

    def _load(self, at: Any, kind: Any, align: int) -> Any:
        return self._builder.load(self._builder.inttoptr(at, kind.as_pointer()), align=align)


def _passing(
    _context: Any,
    _rows: Any,
    _lines: Any,
    _rows_at: Any,
    _row_bytes: Any,
    _panel_at: Any,
    _pairs: Any,
    _bias_at: Any,
    _out_at: Any,
    _out_bytes: Any,
    _ahead_at: Any,
) -> Any:
    """Multiply 1 to 6 rows with a panel, fetching 0, 1, 2 or 4 lines of what lies ahead for each pair of inputs."""

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, lines, *others = arguments
        end = builder.append_basic_block("end")
        # The number of a pass: its lines in the lower three bits, its rows above.
        number = builder.add(builder.mul(rows, ir.Constant(_LONG, 8)), lines)
        switch = builder.switch(number, end)
        for row_count in range(1, PASS_ROWS + 1):
            for line_count in (0, 1, 2, 4):
                block = builder.append_basic_block("pass")
                switch.add_case(ir.Constant(_LONG, row_count * 8 + line_count), block)
                builder.position_at_end(block)
                _Pass(builder, row_count, line_count).write(others)
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
            bias_at,
            out_at + row * out_bytes,
            out_bytes,
            panel_at + pairs * (_PAIR_BYTES + index * fetched * _LINE),
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
            weight_at + panel * pairs * _PAIR_BYTES,
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
