"""Attention of many rows in bfloat16 for processors that multiply pairs of bfloat16 (see `kernels/vectors.py`).

Keys and values are laid out once, straight from the paged cache, as panels that rows are multiplied with (see
`kernels/gemm.py`). Then some rows at a time are multiplied with all keys that they see, softened while their scores
are in the cache, and multiplied with the values. Nothing is compiled for a shape, and little is filled up: keys to a
panel, rows to a pass. What a row gets depends neither on how its prompt is cut nor on the rows beside it.

Where pairs are multiplied, scores and weights are rounded to bfloat16, as transformers' own eager attention does. Where
float32 is, nothing is but the result.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.elementwise import halves, rounded
from vsched_workers.backends.cpu.kernels.gemm import PANEL, PASS_ROWS, Pass, take
from vsched_workers.backends.cpu.kernels.numba_basics import (
    as_float,
    as_kind,
    compiled,
    exp2,
    larger,
)
from vsched_workers.backends.cpu.kernels.vectors import LANES, LINE, LONG, WORD, Writer

BLOCK = 4 * PASS_ROWS
"""Rows that are computed at once: a panel is read for all of them, and their scores stay in the cache."""


class Work(NamedTuple):
    """Rows of some sequences of one length, which attend to the keys of their own sequence. `at` is an address.

    Attributes:
        query_at: The queries, [heads, sequences, rows, head dim]; heads are `query_head_bytes` apart.
        query_head_bytes: Bytes from a head to the next.
        heads: Query heads, a multiple of `kv_heads`.
        sequences: How many there are.
        rows: Rows of each, at least one.
        head_dim: A multiple of 16.
        keys_at: The keys. Those of head h and sequence s begin at `h * head_bytes + s * len(slots) * slot_bytes`.
        values_at: The values, which lie as keys do.
        slot_bytes: Bytes from a slot to the next.
        head_bytes: Bytes from a key head to the next.
        kv_heads: Key heads.
        slots: In which slots the keys of a sequence are, int64 [keys].
        laid_at: Room for keys and values as they are laid out, `4 * kv_heads * sequences * padded * head_dim` bytes, at
            a multiple of 64.
        padded: Keys of a sequence, filled up to whole panels.
        more: 1 has the last row see all keys, and each row one less than the next; 0 has all rows see all keys.
        factor: Scores times this, float32, are powers of two.
        out_at: The result, [sequences, rows, heads, head dim].
        like: An array of the type that is multiplied: float32, or uint16 for pairs of bfloat16.
    """

    query_at: int
    query_head_bytes: int
    heads: int
    sequences: int
    rows: int
    head_dim: int
    keys_at: int
    values_at: int
    slot_bytes: int
    head_bytes: int
    kv_heads: int
    slots: npt.NDArray[np.int64]
    laid_at: int
    padded: int
    more: int
    factor: np.float32
    out_at: int
    like: npt.NDArray[Any]


# --- what is written for the compiler below numba ---


def _multiplying(
    _context: Any,
    kind: Any,
    out_kind: Any,
    _vectors: Any,
    _rows_at: Any,
    _row_bytes: Any,
    _panel_at: Any,
    _pairs: Any,
    _out_at: Any,
    _out_bytes: Any,
) -> Any:
    """Multiply six rows with a panel of 1, 2 or 4 vectors; rows and results are of the types of the kinds."""
    single, single_out = (isinstance(each, numba.types.Float) for each in (kind, out_kind))

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, _, vectors, rows_at, row_bytes, panel_at, pairs, *out = arguments
        end = builder.append_basic_block("end")
        switch = builder.switch(vectors, end)
        for count in (1, 2, 4):
            block = builder.append_basic_block("pass")
            switch.add_case(ir.Constant(LONG, count), block)
            builder.position_at_end(block)
            one = Pass(builder, PASS_ROWS, vectors=count, single=single)
            sums = one.sums(rows_at, row_bytes, panel_at, pairs)
            one.store(sums, *out, single=single_out)
            builder.branch(end)
        builder.position_at_end(end)

    return numba.void(kind, out_kind, *[numba.intp] * 7), make


def _pairing(_context: Any, _first_at: Any, _second_at: Any, _to_at: Any) -> Any:
    """Write a vector of pairs, each of a value of one row and the one below it."""

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        first_at, second_at, to_at = arguments
        writer = Writer(builder)
        narrow, wide = (ir.VectorType(kind, LANES) for kind in (ir.IntType(16), WORD))
        first, second = (
            builder.zext(writer.load(at, narrow), wide) for at in (first_at, second_at)
        )
        upper = builder.shl(second, ir.Constant(wide, [16] * LANES))
        writer.store(builder.or_(first, upper), to_at, 4)

    return numba.void(*[numba.intp] * 3), make


def _moving(_context: Any, _from_at: Any, _to_at: Any) -> Any:
    """Copy a pair."""

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        writer = Writer(builder)
        writer.store(writer.load(arguments[0], WORD), arguments[1])

    return numba.void(numba.intp, numba.intp), make


_multiply: Any = numba.extending.intrinsic(_multiplying)
_pair: Any = numba.extending.intrinsic(_pairing)
_move: Any = numba.extending.intrinsic(_moving)


# --- laying out ---


@compiled()
def _vectors_of(columns: int) -> int:
    """Return how many vectors the next panel of values has, of so many columns that are left."""
    return 4 if columns >= 4 * LANES else 2 if columns >= 2 * LANES else 1


@compiled()
def _lay_keys(first_at: int, second_at: int, head_dim: int, to_at: int) -> None:
    """Write two keys to their columns of a panel."""
    for pair in range(head_dim // 2):
        at = to_at + pair * PANEL * 4
        _move(first_at + 4 * pair, at)
        _move(second_at + 4 * pair, at + 4)


@compiled()
def _lay_values(
    first_at: int, second_at: int, head_dim: int, pair: int, padded: int, to_at: int
) -> None:
    """Write the values of two keys to their row of every panel of values."""
    column = 0
    while column < head_dim:
        vectors = _vectors_of(head_dim - column)
        at = to_at + padded * column * 2 + pair * vectors * LINE
        for vector in range(vectors):
            offset = 2 * (column + vector * LANES)
            _pair(first_at + offset, second_at + offset, at + vector * LINE)
        column += vectors * LANES


@compiled()
def _lay_panel(work: Work, task: int) -> None:
    """Lay out the keys of one panel and their values, with zeros behind the last of all."""
    panels, size = work.padded // PANEL, 2 * work.head_dim
    which, panel = task // panels, task % panels
    head, sequence = which // work.sequences, which % work.sequences
    start = head * work.head_bytes + sequence * len(work.slots) * work.slot_bytes
    laid_at = work.laid_at + which * 2 * work.padded * size
    nothing = np.zeros(work.head_dim, dtype=np.uint16)
    for index in range(panel * PANEL, (panel + 1) * PANEL, 2):
        first_key = second_key = first_value = second_value = nothing.ctypes.data
        if index < len(work.slots):
            offset = start + work.slots[index] * work.slot_bytes
            first_key, first_value = work.keys_at + offset, work.values_at + offset
        if index + 1 < len(work.slots):
            offset = start + work.slots[index + 1] * work.slot_bytes
            second_key, second_value = work.keys_at + offset, work.values_at + offset
        column_at = laid_at + panel * PANEL * size + index % PANEL * 4
        _lay_keys(first_key, second_key, work.head_dim, column_at)
        values_at = laid_at + work.padded * size
        _lay_values(first_value, second_value, work.head_dim, index // 2, work.padded, values_at)


# --- attending ---


@compiled()
def _soften(scores: Any, seen: int, width: int, factor: Any) -> Any:
    """Replace the scores that a row sees by weights, powers of two of `factor` times them, the highest of which is 1.

    The others become zero. Returns what the weights are to be divided by.
    """
    highest = as_float(scores[0])
    for index in range(seen):
        highest = larger(highest, as_float(scores[index]))
    total = np.float32(0.0)
    for index in range(seen):
        weight = exp2((as_float(scores[index]) - highest) * factor)
        scores[index] = as_kind(scores[0], weight)
        total += weight
    unseen = scores[seen:width]
    for index in range(len(unseen)):
        unseen[index] = 0
    return total


@compiled()
def _score(queries: Any, keys_at: int, width: int, scores: Any) -> None:
    """Write the products of queries, whole passes of them, with so many keys."""
    filled, head_dim = queries.shape
    kind, key_bytes = queries[0, 0], 2 * head_dim
    for key in range(0, width, PANEL):
        for row in range(0, filled, PASS_ROWS):
            _multiply(
                kind,
                kind,
                PANEL // LANES,
                queries[row].ctypes.data,
                queries.strides[0],
                keys_at + key * key_bytes,
                head_dim // 2,
                scores[row].ctypes.data + key * scores.itemsize,
                scores.strides[0],
            )


@compiled()
def _combine(weights: Any, width: int, values_at: int, padded: int, made: Any) -> None:
    """Write the products of weights, whole passes of them, with the values of so many keys."""
    filled, head_dim = made.shape
    column = 0
    while column < head_dim:
        vectors = _vectors_of(head_dim - column)
        for row in range(0, filled, PASS_ROWS):
            _multiply(
                weights[0, 0],
                made[0, 0],
                vectors,
                weights[row].ctypes.data,
                weights.strides[0],
                values_at + padded * column * 2,
                width // 2,
                made[row].ctypes.data + column * made.itemsize,
                made.strides[0],
            )
        column += vectors * LANES


@compiled()
def _whole_passes(rows_at: int, rows: int, head_dim: int, like: Any) -> Any:
    """Return rows of bfloat16 in the type of `like`, and zeros below them: [whole passes, head dim]."""
    filled = (rows + PASS_ROWS - 1) // PASS_ROWS * PASS_ROWS
    copied = np.zeros((filled, head_dim), dtype=like.dtype)
    for row in range(rows):
        take(rows_at + row * 2 * head_dim, copied[row])
    return copied


@compiled()
def _attend_block(work: Work, task: int) -> None:
    """Attend for the rows of one block, which are of one head and sequence."""
    head_dim, size = work.head_dim, 2 * work.head_dim
    blocks = (work.rows + BLOCK - 1) // BLOCK
    which, first = task // blocks, task % blocks * BLOCK
    head, sequence = which // work.sequences, which % work.sequences
    start, rows = sequence * work.rows + first, min(BLOCK, work.rows - first)
    seen = len(work.slots) - (work.rows - 1 - first) * work.more
    width = (seen + (rows - 1) * work.more + PANEL - 1) // PANEL * PANEL
    laid = head // (work.heads // work.kv_heads) * work.sequences + sequence
    keys_at = work.laid_at + laid * 2 * work.padded * size
    query_at = work.query_at + head * work.query_head_bytes + start * size
    queries = _whole_passes(query_at, rows, head_dim, work.like)
    # A vector apart, or the rows of a pass would lie where the cache has few places for them.
    scores = np.empty((len(queries), width + LANES), dtype=work.like.dtype)
    _score(queries, keys_at, width, scores)
    totals = np.empty(rows, dtype=np.float32)
    for row in range(rows):
        totals[row] = _soften(scores[row], seen + row * work.more, width, work.factor)
    made = np.empty((len(queries), head_dim), dtype=np.float32)
    _combine(scores, width, keys_at + work.padded * size, work.padded, made)
    for row in range(rows):
        out = halves(work.out_at + ((start + row) * work.heads + head) * size, head_dim)
        own, share = made[row], np.float32(1.0) / totals[row]
        for index in range(head_dim):
            out[index] = rounded(own[index] * share)


@compiled()
def attend(work: Work) -> None:
    """Attend as `Work` tells."""
    for task in range(work.kv_heads * work.sequences * (work.padded // PANEL)):
        _lay_panel(work, task)
    for task in range(work.heads * work.sequences * ((work.rows + BLOCK - 1) // BLOCK)):
        _attend_block(work, task)


@compiled(parallel=True)
def attend_parallel(work: Work) -> None:
    """As `attend`, on all threads."""
    for task in numba.prange(work.kv_heads * work.sequences * (work.padded // PANEL)):
        _lay_panel(work, task)
    for task in numba.prange(work.heads * work.sequences * ((work.rows + BLOCK - 1) // BLOCK)):
        _attend_block(work, task)


def warm_up(like: npt.NDArray[Any], *, threads: int) -> None:
    """Compile for the type of `like`, so that the first request does not wait for it."""
    work = Work(
        query_at=0,
        query_head_bytes=0,
        heads=1,
        sequences=0,
        rows=1,
        head_dim=LANES,
        keys_at=0,
        values_at=0,
        slot_bytes=0,
        head_bytes=0,
        kv_heads=1,
        slots=np.empty(0, dtype=np.int64),
        laid_at=0,
        padded=0,
        more=0,
        factor=np.float32(1.0),
        out_at=0,
        like=like,
    )
    for kernel in (attend, attend_parallel)[: 1 + (threads > 1)]:
        kernel(work)
