"""Products in tiles (AMX): bfloat16 rows times a weight that lies in halves of panels, any number of rows.

AMX multiplies tiles: 16 rows of 32 inputs with 32 inputs of 16 outputs, in 16 cycles, eight times as fast as
VDPBF16PS. There are eight tiles: four hold the sums of 32 rows and 32 outputs, two hold rows and two weights, so that
each tile that is loaded is multiplied twice.

**Layout.** A weight [out, in] lies in halves of panels, 32 outputs each, padded with zeros, in which two neighbouring
inputs lie together: [out / 32, in / 2, 32, 2]. Two tiles of weights lie side by side in it.
Rows are laid out first, [rows / 16, in / 32, 16, 32]: a tile is a kilobyte of neighbouring lines, wherever rows lie.

**Blocking.** All rows are multiplied with half a panel, 32 at a time. The first ones read it from memory, for which
lines are fetched a little ahead of their use, some before each tile: so a processor reads a quarter more than where a
whole panel is fetched ahead. The others find it in the second cache. Rows that do not fit into that are multiplied with
several halves, so that rows are read again less often.

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
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits, threaded
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
    cases,
    has_amx,
)

logger = logging.getLogger(__name__)

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
"""Most rows that every thread lays out for itself: to wait for one another would take longer."""
TOGETHER = 2
"""Tiles of rows that are multiplied together."""
AHEAD_BYTES = 1 << 12
"""Bytes that weights are fetched ahead of their use."""
SUM_BYTES = 4 * HALF
"""Bytes of a row's sums with half a panel."""
_CACHE_BYTES = 1 << 20
"""Bytes of the second cache that rows may take up; where they are more, weights do."""
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
        declared = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
        module, name = self.builder.module, f"llvm.x86.{name}"
        function = module.globals.get(name) or ir.Function(module, declared, name)
        self.builder.call(function, arguments)

    def load_tile(self, tile: int, at: Any, line_bytes: int) -> None:
        """Load a tile whose lines lie so many bytes apart."""
        self.tiles("tileloadd64", [tile], self.pointer(at), ir.Constant(LONG, line_bytes))

    def add_products(
        self, count: int, rows_at: Any, row_tile_bytes: Any, weights_at: Any, ahead: int = 0
    ) -> None:
        """Add the products of one or two tiles of rows and a step of half a panel to the sums.

        As many lines as these weights have are fetched so many bytes behind them.
        """
        for row in range(count):
            self.load_tile(_ROWS + row, self.advance(rows_at, row_tile_bytes, row), LINE)
        for vector in (0, 1):
            if ahead:
                first = ahead + vector * STEP_BYTES // 2
                for byte in range(first, first + STEP_BYTES // 2, LINE):
                    self.prefetch(self.behind(weights_at, byte), locality=2)
            self.load_tile(_WEIGHTS + vector, self.behind(weights_at, vector * LINE), PAIR_BYTES)
            for row in range(count):
                self.tiles("tdpbf16ps", [2 * row + vector, _ROWS + row, _WEIGHTS + vector])

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


@emits(numba.void, *[numba.intp] * 9)
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
    fetches: Any,
) -> None:
    """Multiply one or two tiles of rows with half a panel, and write the sums, float32, whose rows lie so far apart.

    A last step of fewer inputs has its weights at `rest_at`, filled up with zeros; 0 where there is none. With
    `fetches`, 1 or 0, the half is fetched from memory, and behind its end what is next.
    """
    writer = _TileWriter(builder)
    number = builder.add(builder.mul(row_tiles, ir.Constant(LONG, 2)), fetches)
    for case in cases(builder, number, range(2, 2 * TOGETHER + 2)):
        count, ahead = case // 2, AHEAD_BYTES if case % 2 else 0
        tiles = [2 * row + vector for row in range(count) for vector in (0, 1)]
        for tile in tiles:
            writer.tiles("tilezero", [tile])
        with builder.if_then(builder.icmp_signed(">", steps, ir.Constant(LONG, 0))):
            loop = Loop(builder, [])
            at = writer.advance(rows_at, loop.index, TILE_BYTES)
            weights_at = writer.advance(half_at, loop.index, STEP_BYTES)
            writer.add_products(count, at, row_tile_bytes, weights_at, ahead)
            loop.end([], steps)
        with builder.if_then(builder.icmp_signed("!=", rest_at, ir.Constant(LONG, 0))):
            at = writer.advance(rows_at, steps, TILE_BYTES)
            writer.add_products(count, at, row_tile_bytes, rest_at)
        for tile in tiles:
            place = ir.Constant(LONG, tile % 2 * LINE)
            at = writer.advance(sums_at, sums_bytes, tile // 2 * TILE_ROWS)
            at = writer.pointer(builder.add(at, place))
            writer.tiles("tilestored64", [tile], at, sums_bytes)


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
    part_at, out_bytes = sums_at + TOGETHER * TILE_ROWS * SUM_BYTES, 2 * outputs
    ends = column + HALF > outputs
    for index in range(TOGETHER):
        count = min(TILE_ROWS, rows - row)
        if count <= 0:
            break
        at = out_at + row * out_bytes + 2 * column
        _write_rows(
            bias_tag[0], count, sums_at + index * TILE_ROWS * SUM_BYTES,
            bias_at + column * bias_tag.itemsize, part_at if ends else at,
            2 * HALF if ends else out_bytes,
        )  # fmt: skip
        if ends:
            for each in range(count):
                _copy(part_at + each * 2 * HALF, at + each * out_bytes, outputs - column)
        row += TILE_ROWS


@compiled()
def multiply_halves(
    bias_tag: Any,
    first: int,
    stop: int,
    rows: int,
    rows_at: int,
    inputs: int,
    weights_at: int,
    half_bytes: int,
    rests_at: int,
    outputs: int,
    bias_at: int,
    out_at: int,
    sums_at: int,
    fetches: int,
) -> None:
    """Multiply all rows, which are laid out, with the halves of panels `first` to `stop`.

    Args:
        bias_tag: The dtype tag of the bias, which is padded to whole panels.
        first: A half: its outputs begin at 32 times that.
        stop: The half behind the last one.
        rows: Rows.
        rows_at: Where they are laid out.
        inputs: Inputs of a row.
        weights_at: Where the first half lies.
        half_bytes: Bytes from one half to the next.
        rests_at: Where the last inputs of each half lie, filled up to a step; 0 where there are whole steps only.
        outputs: Outputs of the weight, those of a row of the result.
        bias_at: Where the bias lies, of all outputs.
        out_at: Where the result lies.
        sums_at: Room for four tiles of sums, and a tile's rows of half a panel (`SUMS_BYTES`).
        fetches: 1 to fetch the weights from memory, 0 where they are in a cache.
    """
    steps, whole = (inputs + STEP_INPUTS - 1) // STEP_INPUTS, inputs // STEP_INPUTS
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    tile_bytes = steps * TILE_BYTES
    for tile in range(0, tiles, TOGETHER):
        for half in range(first, stop):
            column = half * HALF
            if column >= outputs:
                break
            half_at = weights_at + (half - first) * half_bytes
            rest_at = rests_at + (half - first) * STEP_BYTES if rests_at else 0
            multiply_tiles(
                min(TOGETHER, tiles - tile), whole, rows_at + tile * tile_bytes, tile_bytes, half_at,
                rest_at, sums_at, SUM_BYTES, fetches if tile == 0 else 0,
            )  # fmt: skip
            _write_tiles(
                bias_tag, tile * TILE_ROWS, rows, column, outputs, sums_at, bias_at, out_at
            )


SUMS_BYTES = TOGETHER * TILE_ROWS * SUM_BYTES + TILE_ROWS * 2 * HALF
"""Bytes of the room that `multiply_halves` needs."""


@compiled()
def halves_together(rows: int, inputs: int) -> int:
    """Return how many halves of panels rows of so many inputs are multiplied with at a time."""
    if laid_out_bytes(rows, inputs) <= _CACHE_BYTES:
        return 1
    return max(_CACHE_BYTES // (inputs // 2 * PAIR_BYTES), 1)


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
    """Multiply all rows with the halves of panels `first` to `stop`."""
    half_bytes = pairs * PAIR_BYTES
    together = halves_together(rows, 2 * pairs)
    whole = 2 * pairs // STEP_INPUTS
    rest = pairs - whole * STEP_INPUTS // 2
    sums = np.empty(SUMS_BYTES + LINE, dtype=np.uint8)
    rests = np.zeros(together * STEP_BYTES + LINE if rest else 1, dtype=np.uint8)
    for begin in range(first, stop, together):
        end = min(begin + together, stop)
        if rest:
            for half in range(begin, end):
                rest_at = weight_at + half * half_bytes + whole * STEP_BYTES
                _copy(rest_at, next_line(rests) + (half - begin) * STEP_BYTES, rest * 2 * HALF)
        multiply_halves(
            tag, begin, end, rows, rows_at, 2 * pairs, weight_at + begin * half_bytes, half_bytes,
            next_line(rests) if rest else 0, outputs, bias_at, out_at, next_line(sums), 1,
        )  # fmt: skip


@threaded
def multiply_in_tiles(
    threads: int,
    tag: Any,
    rows_at: int,
    rows: int,
    pairs: int,
    weight_at: int,
    outputs: int,
    bias_at: int,
    out_at: int,
) -> None:
    """Multiply rows by a weight in halves of panels, on `threads` threads, each of which has neighbouring panels.

    What it is given is what `gemm.multiply` is.
    """
    row_bytes = laid_out_bytes(rows, 2 * pairs) + LINE
    own = rows <= OWN_ROWS_MAX
    taken = np.empty((threads if own else 1, row_bytes), dtype=np.uint8)
    if not own:
        for row in numba.prange(rows):
            lay_out_row(rows_at + row * pairs * 4, row, 2 * pairs, next_line(taken[0]))
    halves = (outputs + HALF - 1) // HALF
    for thread in numba.prange(threads):
        mine = taken[np.int64(thread) if own else 0]
        if own:
            for row in range(rows):
                lay_out_row(rows_at + row * pairs * 4, row, 2 * pairs, next_line(mine))
        configure_tiles(rows)
        _multiply_panels(
            halves * thread // threads, halves * (thread + 1) // threads, tag, rows,
            next_line(mine), pairs, weight_at, outputs, bias_at, out_at,
        )  # fmt: skip
        release_tiles()
