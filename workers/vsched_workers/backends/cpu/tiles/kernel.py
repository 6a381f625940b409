"""Products in tiles (AMX): bfloat16 rows times a weight that lies in halves of panels, any number of rows.

AMX multiplies tiles: 16 rows of 32 inputs with 32 inputs of 16 outputs, in 16 cycles, eight times as fast as
VDPBF16PS. There are eight tiles: four hold the sums of 32 rows and 32 outputs, two hold rows and two weights, so that
each tile that is loaded is multiplied twice.

**Layout.** A weight [out, in] lies in halves of panels, 32 outputs each, padded with zeros, in which two neighbouring
inputs lie together: [out / 32, in / 2, 32, 2]. Two tiles of weights lie side by side in it.
Rows are laid out first, [rows / 16, in / 32, 16, 32]: a tile is a kilobyte of neighbouring lines, wherever rows lie.

**Blocking.** All rows are multiplied with half a panel, 32 at a time: a pass finds the weights in the second cache, but
for the first one. Where that is the only one, it reads them from memory, for which lines are fetched a little ahead of
their use, some before each tile, so that a processor reads a quarter more than where a whole half is fetched ahead.
Several passes fetch the next half meanwhile, each a part of it, so that reading takes no time of its own.

Rows that do not fit into the second cache, and more than 2,048 inputs of several passes, are multiplied part by part of
their inputs. Sums of a part are kept until the next one.

**Awake.** A processor that has computed nothing in vectors for about 0.7 µs takes 0.25 µs until it writes a tile: 30 %
of the time of 32 rows and 1,280 inputs, seen on an Intel Xeon. So there is an addition in each step, of which nothing
is used.

Sums are float32: of each tile, those of the lower and those of the upper inputs of pairs, one by one, then both, then
tile by tile. So a row's result has the same bits whatever rows are beside it. What is too small for float32's normal
numbers counts as zero.

Tiles are registers of a thread, which says how large they are. A process must have asked the operating system for them.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, AMX-BF16.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits
from vsched_workers.backends.cpu.kernels.simd import (
    BF16S,
    BYTE,
    FLOATS,
    LANES,
    LINE,
    LONG,
    WORD,
    InstructionWriter,
    Loop,
    call_llvm,
    cases,
    has_amx,
)
from vsched_workers.backends.cpu.kernels.thread_pool import spread

logger = logging.getLogger(__name__)

binding.initialize_native_asmparser()  # for `stay_awake`

HALF = 2 * LANES
"""Outputs of half a panel."""
PAIR_BYTES = HALF * 2 * 2
"""Bytes of two neighbouring inputs in half a panel."""
STEP_INPUTS = 32
"""Inputs of a tile."""
STEP_BYTES = STEP_INPUTS // 2 * PAIR_BYTES
"""Bytes of half a panel's weights for these."""
TILE_ROWS = 16
TILE_BYTES = TILE_ROWS * LINE
BLOCK_ROWS_MIN, BLOCK_ROWS_MAX = 256, 1024
_BLOCK_BYTES = 1 << 23
"""Bytes of what is multiplied and what comes of it, for as many rows as are worth multiplying at once."""
OWN_ROWS_MAX = TILE_ROWS
"""Most rows that the calling thread lays out by itself: to wake the others would take longer."""
TOGETHER = 2
"""Tiles of rows that are multiplied together."""
AHEAD_BYTES = 1 << 12
"""Bytes that weights are fetched ahead of their use."""
SUM_BYTES = 4 * HALF
"""Bytes of a row's sums with half a panel."""
PASS_BYTES = TOGETHER * TILE_ROWS * SUM_BYTES
"""Bytes of the sums of all rows that are multiplied together."""
_CACHE_BYTES = 1 << 20
"""Most bytes of rows, laid out: they stay in the second cache from one half of a panel to the next."""
_PART_STEPS = 64
"""Most steps of a part that several passes go over: its weights and the next ones stay in the second cache."""
_PARTS_BYTES = 1 << 20
"""Bytes of sums that are kept from one part of the inputs to the next."""
_TOGETHER_WEIGHTS = 1 << 17
"""Weights that a thread multiplies few rows by at once: reading 256 KiB."""
_CLAIMS = 16
"""Into how many claims a weight is cut at least, where sums of many rows are kept: rows are read once for each."""
_STEP_LINES = STEP_BYTES // LINE
_FETCHED_LINES = (2, 4, 8, 16, _STEP_LINES)
"""How many lines of weights can be fetched with a step of two tiles of rows; the most are all that it has."""
_ROWS, _WEIGHTS = 4, 6
"""The first tiles of rows and of weights; those of sums begin at 0."""


def has_tiles() -> bool:
    """Return whether this process may use tiles, for which it asks the operating system.

    Without having asked, it would be killed by the first instruction on them.
    """
    return _asked(os.getpid())


@functools.cache
def _asked(_process: int) -> bool:
    config: Any = numba.config
    chosen = config.CPU_NAME or config.CPU_FEATURES
    if chosen or not has_amx():
        return False
    granted = bool(torch.cpu._init_amx())  # noqa: SLF001  # torch offers it under this name only
    if not granted:
        logger.warning("the operating system does not let this process use the processor's tiles")
    return granted


class _TileWriter(InstructionWriter):
    """Writes instructions on tiles, which have numbers."""

    def tiles(self, name: str, tiles: Sequence[int], *given: Any) -> None:
        """Write an instruction with these tiles and what else it is given."""
        assert has_amx(), "a product has tiles where the processor does"
        arguments = [*(ir.Constant(BYTE, tile) for tile in tiles), *given]
        call_llvm(self.builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)

    def load_tile(self, tile: int, at: Any, line_bytes: Any) -> None:
        """Load a tile whose lines lie so many bytes apart."""
        if isinstance(line_bytes, int):
            line_bytes = ir.Constant(LONG, line_bytes)
        self.tiles("tileloadd64", [tile], self.pointer(at), line_bytes)

    def add_products(
        self,
        count: int,
        rows_at: Any,
        row_tile_bytes: Any,
        weights_at: Any,
        fetched: Sequence[Any] = (),
    ) -> None:
        """Add the products of one or two tiles of rows and a step of half a panel to the sums.

        Lines at the addresses `fetched` are fetched into the second cache.
        """
        for row in range(count):
            self.load_tile(_ROWS + row, self.advance(rows_at, row_tile_bytes, row), LINE)
        for vector in (0, 1):
            for at in fetched[vector::2]:
                self.prefetch(at, locality=2)
            self.load_tile(_WEIGHTS + vector, self.behind(weights_at, vector * LINE), PAIR_BYTES)
            for row in range(count):
                self.tiles("tdpbf16ps", [2 * row + vector, _ROWS + row, _WEIGHTS + vector])

    def stay_awake(self) -> None:
        """Compute something in vectors, of which LLVM does not know that nothing comes of it."""
        kind = ir.FunctionType(ir.VoidType(), [])
        addition = "vaddps %zmm31, %zmm31, %zmm31"
        has_side_effects = True  # so that it stays where it is
        self.builder.asm(kind, addition, "~{zmm31}", [], has_side_effects)

    def behind(self, at: Any, count: int) -> Any:
        """Return the address so many bytes behind another."""
        return self.builder.add(at, ir.Constant(LONG, count))

    def pointer(self, at: Any) -> Any:
        """Return an address as a pointer."""
        return self.builder.inttoptr(at, BYTE.as_pointer())


@emits(numba.void, numba.intp)
def _configure(builder: Any, rows: Any) -> None:
    """Say that this thread's tiles are of 64 bytes a line, and of 16 lines, or those of rows and sums of fewer."""
    writer = _TileWriter(builder)
    kind = ir.ArrayType(BYTE, LINE)
    at = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, None), at)

    def write(value: Any, place: int) -> None:
        index = [ir.Constant(WORD, 0), ir.Constant(WORD, place)]
        builder.store(value, builder.gep(at, index))

    lines = builder.trunc(rows, BYTE)
    write(ir.Constant(BYTE, 1), 0)  # the palette
    for tile in range(8):
        write(ir.Constant(BYTE, LINE), 16 + 2 * tile)
        write(ir.Constant(BYTE, TILE_ROWS) if tile >= _WEIGHTS else lines, 48 + tile)
    writer.tiles("ldtilecfg", [], builder.bitcast(at, BYTE.as_pointer()))


@emits(numba.void)
def release_tiles(builder: Any) -> None:
    """Say that this thread does not use its tiles any more."""
    _TileWriter(builder).tiles("tilerelease", [])


def block_rows(outputs: int, inputs: int) -> int:
    """Return how many rows are worth multiplying at once by a weight of this shape.

    Of fewer, reading the weights is a larger share; of more, what is between two products leaves the cache.
    """
    fitting = _BLOCK_BYTES // (2 * (outputs + inputs)) // STEP_INPUTS * STEP_INPUTS
    return min(max(fitting, BLOCK_ROWS_MIN), BLOCK_ROWS_MAX)


@compiled()
def configure_tiles(rows: int) -> None:
    """Say how large this thread's tiles are, for so many rows."""
    # A tile of no lines is none of 64 bytes either, so there is one where there are no rows.
    _configure(max(min(rows, TILE_ROWS), 1))


@emits(numba.void, *[numba.intp] * 11)
def multiply_tiles(
    builder: Any,
    row_tiles: Any,
    steps: Any,
    rows_at: Any,
    row_tile_bytes: Any,
    half_at: Any,
    rest_at: Any,
    sums_at: Any,
    sums_bytes: Any,
    goes_on: Any,
    lines: Any,
    fetch_at: Any,
) -> None:
    """Multiply one or two tiles of rows with half a panel, and write the sums, float32, whose rows lie so far apart.

    A last step of fewer inputs has its weights at `rest_at`, filled up with zeros; 0 where there is none. With
    `goes_on`, 1 or 0, sums are added to what lies there. With each step so many lines are fetched, 0 or of
    `_FETCHED_LINES` (for one tile of rows the most of these), the first ones at `fetch_at`.
    """
    writer = _TileWriter(builder)
    most = 2 * _STEP_LINES
    number = builder.add(builder.mul(row_tiles, ir.Constant(LONG, most)), lines)
    known = [(1, 0), (1, _STEP_LINES), (2, 0), *((2, each) for each in _FETCHED_LINES)]
    for case in cases(builder, number, [count * most + each for count, each in known]):
        count, fetched = divmod(case, most)
        tiles = [2 * row + vector for row in range(count) for vector in (0, 1)]
        places = [
            writer.behind(
                writer.advance(sums_at, sums_bytes, tile // 2 * TILE_ROWS), tile % 2 * LINE
            )
            for tile in tiles
        ]
        with builder.if_else(builder.icmp_signed("!=", goes_on, ir.Constant(LONG, 0))) as both:
            goes, begins = both
            with goes:
                for tile, place in zip(tiles, places, strict=True):
                    writer.load_tile(tile, place, sums_bytes)
            with begins:
                for tile in tiles:
                    writer.tiles("tilezero", [tile])
        with builder.if_then(builder.icmp_signed(">", steps, ir.Constant(LONG, 0))):
            loop = Loop(builder, [])
            at = writer.advance(rows_at, loop.index, TILE_BYTES)
            weights_at = writer.advance(half_at, loop.index, STEP_BYTES)
            first = writer.advance(fetch_at, loop.index, fetched * LINE)
            ahead = [writer.behind(first, line * LINE) for line in range(fetched)]
            writer.add_products(count, at, row_tile_bytes, weights_at, ahead)
            writer.stay_awake()
            loop.end([], steps)
        with builder.if_then(builder.icmp_signed("!=", rest_at, ir.Constant(LONG, 0))):
            at = writer.advance(rows_at, steps, TILE_BYTES)
            writer.add_products(count, at, row_tile_bytes, rest_at)
        for tile, place in zip(tiles, places, strict=True):
            writer.tiles("tilestored64", [tile], writer.pointer(place), sums_bytes)


@emits(numba.void, None, *[numba.intp] * 5)
def _write_rows(
    builder: Any, bias_kind: Any, rows: Any, sums_at: Any, bias_at: Any, out_at: Any, out_bytes: Any
) -> None:
    """Add the bias to so many rows of sums, and write these rounded, `out_bytes` apart."""
    writer, biases = InstructionWriter(builder), []
    size = 2 if bias_kind is numba.types.uint16 else 4
    for vector in (0, 1):
        at = builder.add(bias_at, ir.Constant(LONG, vector * LANES * size))
        bias = writer.load(at, BF16S if size == 2 else FLOATS, size)
        biases.append(builder.fpext(bias, FLOATS) if size == 2 else bias)
    loop = Loop(builder, [])
    row_at = writer.advance(sums_at, loop.index, SUM_BYTES)
    halves = []
    for vector, bias in enumerate(biases):
        at = builder.add(row_at, ir.Constant(LONG, vector * LINE))
        halves.append(builder.fptrunc(builder.fadd(writer.load(at, FLOATS, LINE), bias), BF16S))
    order = ir.Constant(ir.VectorType(WORD, HALF), list(range(HALF)))
    at = builder.add(out_at, builder.mul(loop.index, out_bytes))
    writer.store(builder.shuffle_vector(*halves, order), at, 2)
    loop.end([], rows)


@compiled()
def next_line(space: Any) -> int:
    """Return the first address in an array, one line longer than needed, at which a line of the cache begins."""
    at: int = (space.ctypes.data + LINE - 1) // LINE * LINE
    return at


@compiled()
def lay_out_row(row_at: int, row: int, inputs: int, tiles_at: int) -> None:
    """Write a row of bfloat16 to its place in the tiles of rows, filled up with zeros."""
    steps = (inputs + STEP_INPUTS - 1) // STEP_INPUTS
    at = tiles_at + row // TILE_ROWS * steps * TILE_BYTES + row % TILE_ROWS * LINE
    for step in range(steps):
        count = min(STEP_INPUTS, inputs - step * STEP_INPUTS)
        given = bf16_array(row_at + 2 * step * STEP_INPUTS, count)
        taken = bf16_array(at + step * TILE_BYTES, STEP_INPUTS)
        for index in range(count):
            taken[index] = given[index]
        for index in range(count, STEP_INPUTS):
            taken[index] = np.uint16(0)


@compiled()
def laid_out_bytes(rows: int, inputs: int) -> int:
    """Return the bytes of rows of so many inputs that are laid out as tiles."""
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    return tiles * ((inputs + STEP_INPUTS - 1) // STEP_INPUTS) * TILE_BYTES


@compiled()
def _copy(from_at: int, to_at: int, count: int) -> None:
    """Copy so many values of bfloat16."""
    source, target = bf16_array(from_at, count), bf16_array(to_at, count)
    for index in range(count):
        target[index] = source[index]


@compiled()
def _write_tiles(
    bias_tag: Any,
    row: int,
    rows: int,
    column: int,
    outputs: int,
    sums_at: int,
    bias_at: int,
    out_at: int,
) -> None:
    """Write the sums of up to `TOGETHER` tiles of rows, from a row on, as outputs from a column on."""
    count = min(TOGETHER * TILE_ROWS, rows - row)
    at = out_at + (row * outputs + column) * 2
    column_bias_at = bias_at + column * bias_tag.itemsize
    if column + HALF <= outputs:
        _write_rows(bias_tag[0], count, sums_at, column_bias_at, at, 2 * outputs)
        return
    # A row is read before it is written to the same place.
    _write_rows(bias_tag[0], count, sums_at, column_bias_at, sums_at, SUM_BYTES)
    for each in range(count):
        _copy(sums_at + each * SUM_BYTES, at + each * 2 * outputs, outputs - column)


@compiled()
def fetched_by(index: int, tiles: int, fetches: int) -> Any:
    """Return how many lines of the next weights a step of a pass fetches, and how many earlier passes have fetched.

    Args:
        index: Of the pass.
        tiles: Tiles of rows. A pass of one tile fetches nothing.
        fetches: 1 where the first pass fetches the weights that it needs, or 0.
    """
    place, passes = index - fetches, tiles // TOGETHER - fetches
    if 0 <= place < passes:
        for lines in _FETCHED_LINES:
            if lines * passes >= _STEP_LINES:
                return (lines, place * lines) if place * lines < _STEP_LINES else (0, 0)
    return 0, 0


@compiled()
def fetches_itself(turn: int, rows: int) -> int:
    """Return 1 where weights are fetched by the rows that are multiplied by them, or 0 if in the turn before."""
    return 1 if turn == 0 or rows <= (2 * TOGETHER - 1) * TILE_ROWS else 0


@compiled()
def multiply_half(
    bias_tag: Any,
    half: int,
    rows: int,
    rows_at: int,
    tile_bytes: int,
    steps: int,
    half_at: int,
    rest_at: int,
    outputs: int,
    bias_at: int,
    out_at: int,
    sums_at: int,
    begins: bool,
    ends: bool,
    fetches: int,
    next_at: int,
) -> None:
    """Multiply all rows, which are laid out, or a part of their inputs, with half a panel.

    Args:
        bias_tag: The dtype tag of the bias, which is padded to whole panels.
        half: Its number: its outputs begin at 32 times that.
        rows: Rows.
        rows_at: Where these inputs of the first row are laid out.
        tile_bytes: Bytes from 16 rows to the next ones.
        steps: Whole steps of inputs.
        half_at: Where their weights lie.
        rest_at: Where the weights of inputs that are no whole step lie, filled up to one; 0 where there are none.
        outputs: Outputs of the weight, those of a row of the result.
        bias_at: Where the bias lies, of all outputs.
        out_at: Where the result lies.
        sums_at: Room for the sums of a pass, or, where there are several parts, of all (`Parts.sums_bytes`).
        begins: Whether it is the first part of the inputs.
        ends: Whether it is the last one.
        fetches: 1 to fetch these weights from memory, 0 where they are in a cache.
        next_at: Weights that are as many, and fetched for later; 0 for none.
    """
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    for index in range((tiles + TOGETHER - 1) // TOGETHER):
        lines, fetch_at = 0, 0
        if fetches and not index:
            lines, fetch_at = _STEP_LINES, half_at + AHEAD_BYTES
        elif next_at:
            lines, before = fetched_by(index, tiles, fetches)
            fetch_at = next_at + before * steps * LINE
        at = sums_at if begins and ends else sums_at + index * PASS_BYTES
        multiply_tiles(
            min(TOGETHER, tiles - TOGETHER * index), steps, rows_at + TOGETHER * index * tile_bytes, tile_bytes,
            half_at, rest_at, at, SUM_BYTES, 0 if begins else 1, lines, fetch_at,
        )  # fmt: skip
        if ends:
            row = TOGETHER * TILE_ROWS * index
            _write_tiles(bias_tag, row, rows, half * HALF, outputs, at, bias_at, out_at)


class Parts(NamedTuple):
    """How a thread multiplies rows by pieces of a weight: by a part of the inputs of some pieces, then by the next.

    Attributes:
        steps: Steps of the inputs.
        size: Steps of a part but for the last one.
        number: Parts.
        together: Pieces of which sums are kept from one part to the next.
        sums_bytes: Bytes of the sums of a piece; 0 where there is one part.
    """

    steps: int
    size: int
    number: int
    together: int
    sums_bytes: int


@compiled()
def parts_of(rows: int, inputs: int, pieces: int, halves: int) -> Parts:
    """Return how rows of so many inputs are multiplied by so many pieces, each of so many halves of panels."""
    steps = (inputs + STEP_INPUTS - 1) // STEP_INPUTS
    count = max((laid_out_bytes(rows, inputs) + _CACHE_BYTES - 1) // _CACHE_BYTES, 1)
    if rows > TOGETHER * TILE_ROWS:
        count = max(count, (steps + _PART_STEPS - 1) // _PART_STEPS)
    size = (steps + count - 1) // count
    count = (steps + size - 1) // size
    passes = (rows + TOGETHER * TILE_ROWS - 1) // (TOGETHER * TILE_ROWS)
    sums_bytes, together = 0, max(pieces, 1)
    if count > 1:
        sums_bytes = halves * passes * PASS_BYTES
        together = min(together, max(_PARTS_BYTES // sums_bytes, 1))
    return Parts(steps, size, count, together, sums_bytes)


@compiled()
def halves_together(rows: int, inputs: int, pieces: int, halves: int) -> int:
    """Return the number of pieces, each of so many halves of panels, that a thread multiplies at once."""
    parts = parts_of(rows, inputs, pieces, halves)
    if parts.number > 1:
        together: int = max(min(parts.together, pieces // _CLAIMS), 1)
        return together
    return max(_TOGETHER_WEIGHTS // (halves * HALF * max(inputs, 1)), 1)


@compiled()
def turn_of(turn: int, pieces: int, parts: Parts) -> Any:
    """Return the number of a piece, of the part of the inputs whose turn it is, and of its sums among those kept."""
    group = turn // (parts.together * parts.number)
    size = min(parts.together, pieces - group * parts.together)
    within = turn - group * parts.together * parts.number
    return group * parts.together + within % size, within // size, within % size


@compiled()
def _multiply_panels(
    first: int,
    stop: int,
    tag: Any,
    rows: int,
    rows_at: int,
    pairs: int,
    weight_at: int,
    outputs: int,
    bias_at: int,
    out_at: int,
) -> None:
    """Multiply all rows, which are laid out, with the halves of panels `first` to `stop`."""
    configure_tiles(rows)
    half_bytes, whole = pairs * PAIR_BYTES, 2 * pairs // STEP_INPUTS
    first_at = weight_at + first * half_bytes
    parts = parts_of(rows, 2 * pairs, stop - first, 1)
    turns = (stop - first) * parts.number
    room = np.empty(max(parts.sums_bytes * parts.together, PASS_BYTES) + LINE, dtype=np.uint8)
    padded = np.zeros(STEP_BYTES + LINE, dtype=np.uint8)
    for turn in range(turns):
        piece, index, kept = turn_of(turn, stop - first, parts)
        start, behind = index * parts.size, min((index + 1) * parts.size, parts.steps)
        at, rest_at, next_at = first_at + piece * half_bytes, 0, 0
        if behind > whole:
            rest_at = next_line(padded)
            rest = pairs - whole * STEP_INPUTS // 2
            _copy(at + whole * STEP_BYTES, rest_at, rest * 2 * HALF)
        if turn + 1 < turns:
            next_piece, next_index, _ = turn_of(turn + 1, stop - first, parts)
            next_at = first_at + next_piece * half_bytes + next_index * parts.size * STEP_BYTES
        multiply_half(
            tag, first + piece, rows, rows_at + start * TILE_BYTES, parts.steps * TILE_BYTES,
            min(behind, whole) - start, at + start * STEP_BYTES, rest_at, outputs, bias_at, out_at,
            next_line(room) + kept * parts.sums_bytes, start == 0, behind == parts.steps,
            fetches_itself(turn, rows), next_at,
        )  # fmt: skip
    release_tiles()


@compiled()
def lay_out_rows(first: int, stop: int, rows_at: int, inputs: int, tiles_at: int) -> None:
    """Write the rows `first` to `stop` to their places in the tiles of rows."""
    for row in range(first, stop):
        lay_out_row(rows_at + 2 * row * inputs, row, inputs, tiles_at)


@compiled()
def multiply_in_tiles(
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
    """Multiply rows by a weight in halves of panels, on the threads of a pool (`thread_pool.spread`).

    What it is given is what `gemm.multiply` is.
    """
    taken = np.empty(laid_out_bytes(rows, 2 * pairs) + LINE, dtype=np.uint8)
    spread(pool, rows, OWN_ROWS_MAX, lay_out_rows, (rows_at, 2 * pairs, next_line(taken)))
    halves = (outputs + HALF - 1) // HALF
    work = tag, rows, next_line(taken), pairs, weight_at, outputs, bias_at, out_at
    spread(pool, halves, halves_together(rows, 2 * pairs, halves, 1), _multiply_panels, work)
    taken[0] = np.uint8(0)  # its address is used above: it must live until here
