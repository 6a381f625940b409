"""AMX GEMM: bfloat16 activations times a weight in half-panels of 32 outputs, for any number of rows M.

    C[m, n] = bias[n] + sum_k A[m, k] * B[n, k]        A [M, K], B the weight [N, K], C [M, N]

TDPBF16PS multiplies a tile of A (16 rows x 32 inputs) by a tile of B (32 inputs x 16 outputs) in 16 cycles, eight
times as fast as VDPBF16PS. A thread has eight tile registers: four accumulators for 32 rows x 32 outputs, two tiles
of A, two tiles of B. So each loaded tile is used in two products.

               B: tile 6   tile 7
  A: tile 4      C 0         C 1       rows 0 .. 15
     tile 5      C 2         C 3       rows 16 .. 31

**Packing of B.** Half-panels of 32 outputs, padded with zeros, with pairs of neighbouring inputs together:
[N / 32, K / 2, 32, 2]. A K step is 32 inputs, 16 lines of 128 bytes, and holds two B tiles next to each other:

                     tile 6                     tile 7
  inputs 0, 1    | n0 n0 n1 n1 .. n15 n15 | n16 n16 .. n31 n31 |    one line: 2 x 64 bytes
  inputs 2, 3    | n0 n0 n1 n1 .. n15 n15 | n16 n16 .. n31 n31 |
     ..
  inputs 30, 31  | n0 n0 n1 n1 .. n15 n15 | n16 n16 .. n31 n31 |

**Packing of A.** [M / 16, K / 32, 16, 32]: each A tile is 1 KiB of consecutive cache lines, independent of the row
stride of A (`pack_row`).

**Blocking.** All rows are multiplied by one half-panel, 32 rows per pass. The first pass reads the half-panel from
memory, later passes find it in the L2 cache. A single pass prefetches weights `AHEAD_BYTES` ahead, two K steps: with
few rows weights are read a quarter faster than with the whole next half-panel prefetched. With several passes, each
prefetches its share of the next half-panel, so memory reads overlap with the products.

K is split into parts if the packed A exceeds the L2 cache, and, with several passes, at 2,048 inputs. The
accumulators of a part are stored and reloaded for the next part.

**Vector unit wake-up.** After about 0.7 us without a vector instruction, storing a tile takes 0.25 us: 30 % of the
time of M = 32, K = 1,280 on an Intel Xeon. So each K step has one vector addition with an unused result.

**Rounding.** Accumulators are float32. Within a tile the products of even and of odd inputs are added up
separately, then together, then tile by tile. So the result of a row has the same bits whatever other rows are in
the batch. AMX flushes denormals to zero.

Tile registers belong to a thread, which configures their shapes. A process must request permission from the operating
system first.

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
import numpy.typing as npt
import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils

from vsched_workers.backends.cpu.kernels.bf16 import BF16, bf16_array, copy
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits, kernel
from vsched_workers.backends.cpu.kernels.gemm import PRODUCT
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
"""Outputs (N) of a half-panel, two B tiles."""
PAIR_BYTES = HALF * 2 * 2
"""Bytes of one pair of inputs in a half-panel."""
STEP_INPUTS = 32
"""Inputs (K) of a tile."""
STEP_BYTES = STEP_INPUTS // 2 * PAIR_BYTES
"""Bytes of one K step of a half-panel."""
TILE_ROWS = 16
TILE_BYTES = TILE_ROWS * LINE
OWN_ROWS_MAX = TILE_ROWS
"""Maximum rows that the calling thread packs alone: waking the other threads would take longer."""
TOGETHER = 2
"""Tiles of A that are multiplied together: 32 rows."""
AHEAD_BYTES = 1 << 12
"""Prefetch distance for weights, bytes."""
SUM_BYTES = 4 * HALF
"""Bytes of the accumulators of one row and a half-panel."""
PASS_BYTES = TOGETHER * TILE_ROWS * SUM_BYTES
"""Bytes of the accumulators of a pass."""
_CACHE_BYTES = 1 << 20
"""Maximum bytes of packed A: it stays in the L2 cache from one half-panel to the next."""
_PART_STEPS = 64
"""Maximum K steps of a part with several passes: its weights and the next ones stay in the L2 cache."""
_PARTS_BYTES = 1 << 20
"""Bytes of accumulators that are stored between parts of K."""
_TOGETHER_WEIGHTS = 1 << 17
"""Weights that a thread claims at once with few rows: reading 256 KiB."""
_CLAIMS = 16
"""Minimum number of claims that a weight is split into when accumulators are stored: each claim reads A once."""
_STEP_LINES = STEP_BYTES // LINE
_FETCHED_LINES = (2, 4, 8, 16, _STEP_LINES)
"""Choices for the lines of weights that a K step prefetches in a pass of two tiles; the maximum is the whole step."""
_ROWS, _WEIGHTS = 4, 6
"""First tile register of A, and of B; accumulators start at 0."""


def has_tiles() -> bool:
    """Return True if this process may use tiles; requests permission from the operating system on the first call.

    Linux kills a process that executes a tile instruction without permission.
    """
    return _requested(os.getpid())


@functools.cache
def _requested(_process: int) -> bool:
    config: Any = numba.config
    chosen = config.CPU_NAME or config.CPU_FEATURES
    if chosen or not has_amx():
        return False
    granted = bool(torch.cpu._init_amx())  # noqa: SLF001  # torch offers it under this name only
    if not granted:
        logger.warning("the operating system does not let this process use the processor's tiles")
    return granted


class _TileWriter(InstructionWriter):
    """Emits tile instructions. Tile registers are numbers."""

    def tiles(self, name: str, tiles: Sequence[int], *operands: Any) -> None:
        """Emit an instruction with these tile registers and operands."""
        assert has_amx(), "tile instructions need AMX"
        arguments = [*(ir.Constant(BYTE, tile) for tile in tiles), *operands]
        call_llvm(self.builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)

    def load_tile(self, tile: int, at: Any, line_bytes: Any) -> None:
        """Emit the load of a tile with `line_bytes` between its lines."""
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
        """Emit one K step: add the products of one or two A tiles and both B tiles to the accumulators.

        The lines at the addresses `fetched` are prefetched into the L2 cache.
        """
        for row in range(count):
            self.load_tile(_ROWS + row, self.advance(rows_at, row_tile_bytes, row), LINE)
        for vector in (0, 1):
            for at in fetched[vector::2]:
                self.prefetch(at, locality=2)
            self.load_tile(_WEIGHTS + vector, self.offset(weights_at, vector * LINE), PAIR_BYTES)
            for row in range(count):
                self.tiles("tdpbf16ps", [2 * row + vector, _ROWS + row, _WEIGHTS + vector])

    def stay_awake(self) -> None:
        """Emit a vector addition that LLVM cannot remove, to keep the vector unit awake (see the head of this file)."""
        kind = ir.FunctionType(ir.VoidType(), [])
        addition = "vaddps %zmm31, %zmm31, %zmm31"
        has_side_effects = True  # LLVM must neither remove nor move it
        self.builder.asm(kind, addition, "~{zmm31}", [], has_side_effects)

    def pointer(self, at: Any) -> Any:
        """Address as a pointer."""
        return self.builder.inttoptr(at, BYTE.as_pointer())


@emits(numba.void, numba.intp)
def _configure(builder: Any, rows: Any) -> None:
    """Configure this thread's tiles: 64 bytes per line; 16 lines, or fewer in A and accumulators."""
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
    """Return this thread's tiles to their initial state."""
    _TileWriter(builder).tiles("tilerelease", [])


@compiled()
def configure_tiles(rows: int) -> None:
    """Configure this thread's tiles for a number of rows."""
    # A tile of zero lines must have zero bytes per line too, so zero rows are configured as one.
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
    accumulate: Any,
    fetch_lines: Any,
    fetch_at: Any,
) -> None:
    """Multiply one or two A tiles by a half-panel and store the float32 accumulators, `sums_bytes` between rows.

    `rest_at` is a last K step of fewer inputs, padded with zeros, or 0 if there is none. `accumulate` is 1 to start
    from the stored accumulators, 0 to start from zero. `fetch_lines` is the number of cache lines to prefetch per K
    step, the first ones at `fetch_at`: 0 or one of `_FETCHED_LINES` (with one A tile the maximum of these).

    Emits a switch with one unrolled loop for each combination of A tiles and prefetched lines, since tile registers
    are immediate operands.
    """
    writer = _TileWriter(builder)
    lines_max = 2 * _STEP_LINES
    number = builder.add(builder.mul(row_tiles, ir.Constant(LONG, lines_max)), fetch_lines)
    known = [(1, 0), (1, _STEP_LINES), (2, 0), *((2, each) for each in _FETCHED_LINES)]
    for case in cases(builder, number, [count * lines_max + each for count, each in known]):
        count, fetched = divmod(case, lines_max)
        tiles = [2 * row + vector for row in range(count) for vector in (0, 1)]
        addresses = [
            writer.offset(
                writer.advance(sums_at, sums_bytes, tile // 2 * TILE_ROWS), tile % 2 * LINE
            )
            for tile in tiles
        ]
        with builder.if_else(builder.icmp_signed("!=", accumulate, ir.Constant(LONG, 0))) as both:
            from_stored, from_zero = both
            with from_stored:
                for tile, address in zip(tiles, addresses, strict=True):
                    writer.load_tile(tile, address, sums_bytes)
            with from_zero:
                for tile in tiles:
                    writer.tiles("tilezero", [tile])
        with builder.if_then(builder.icmp_signed(">", steps, ir.Constant(LONG, 0))):
            loop = Loop(builder, [])
            at = writer.advance(rows_at, loop.index, TILE_BYTES)
            weights_at = writer.advance(half_at, loop.index, STEP_BYTES)
            first = writer.advance(fetch_at, loop.index, fetched * LINE)
            ahead = [writer.offset(first, line * LINE) for line in range(fetched)]
            writer.add_products(count, at, row_tile_bytes, weights_at, ahead)
            writer.stay_awake()
            loop.end([], steps)
        with builder.if_then(builder.icmp_signed("!=", rest_at, ir.Constant(LONG, 0))):
            at = writer.advance(rows_at, steps, TILE_BYTES)
            writer.add_products(count, at, row_tile_bytes, rest_at)
        for tile, address in zip(tiles, addresses, strict=True):
            writer.tiles("tilestored64", [tile], writer.pointer(address), sums_bytes)


@emits(numba.void, None, *[numba.intp] * 5)
def _write_rows(
    builder: Any, bias_kind: Any, rows: Any, sums_at: Any, bias_at: Any, out_at: Any, out_bytes: Any
) -> None:
    """Epilogue: add the bias to the accumulators of rows, round to bfloat16, store them `out_bytes` apart."""
    writer, biases = InstructionWriter(builder), []
    size = 2 if bias_kind is numba.types.uint16 else 4
    for vector in (0, 1):
        at = writer.offset(bias_at, vector * LANES * size)
        bias = writer.load(at, BF16S if size == 2 else FLOATS, size)
        biases.append(builder.fpext(bias, FLOATS) if size == 2 else bias)
    loop = Loop(builder, [])
    row_at = writer.advance(sums_at, loop.index, SUM_BYTES)
    halves = []
    for vector, bias in enumerate(biases):
        at = writer.offset(row_at, vector * LINE)
        halves.append(builder.fptrunc(builder.fadd(writer.load(at, FLOATS, LINE), bias), BF16S))
    order = ir.Constant(ir.VectorType(WORD, HALF), list(range(HALF)))
    at = builder.add(out_at, builder.mul(loop.index, out_bytes))
    writer.store(builder.shuffle_vector(*halves, order), at, 2)
    loop.end([], rows)


@compiled()
def next_line(space: Any) -> int:
    """First address in an array that is aligned to a cache line; the array is one line longer than needed."""
    at: int = (space.ctypes.data + LINE - 1) // LINE * LINE
    return at


@compiled()
def pack_row(row: int, rows_at: int, inputs: int, tiles_at: int) -> None:
    """Pack a row of A, bfloat16, into its A tiles, padded with zeros.

    row r of A      | k0 .. k31 | k32 .. k63 | ..
                          |            |
    tile row r / 16:   tile 0        tile 1        each 16 lines of 64 bytes
    line r % 16        k0 .. k31     k32 .. k63
    """
    steps = (inputs + STEP_INPUTS - 1) // STEP_INPUTS
    at = tiles_at + row // TILE_ROWS * steps * TILE_BYTES + row % TILE_ROWS * LINE
    for step in range(steps):
        count = min(STEP_INPUTS, inputs - step * STEP_INPUTS)
        source = bf16_array(rows_at + 2 * (row * inputs + step * STEP_INPUTS), count)
        target = bf16_array(at + step * TILE_BYTES, STEP_INPUTS)
        for index in range(count):
            target[index] = source[index]
        for index in range(count, STEP_INPUTS):
            target[index] = np.uint16(0)


@compiled()
def packed_bytes(rows: int, inputs: int) -> int:
    """Bytes of packed A."""
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    return tiles * ((inputs + STEP_INPUTS - 1) // STEP_INPUTS) * TILE_BYTES


@compiled()
def fetched_by(index: int, tiles: int, fetches: int) -> Any:
    """Lines of the next half-panel that each K step of pass `index` prefetches, and those of the passes before.

    They are shared by the passes of two A tiles, without the first one if `fetches` is 1 (`fetches_itself`):

      rows    fetches   pass 0        pass 1          pass 2          pass 3
      16, 48  1         its own       -
      64      1         its own       lines 0 .. 31
      64      0         lines 0..15   lines 16 .. 31
      128     1         its own       lines 0 .. 15   lines 16 .. 31  -
      128     0         lines 0..7    lines 8 .. 15   lines 16 .. 23  lines 24 .. 31
    """
    number, passes = index - fetches, tiles // TOGETHER - fetches
    if 0 <= number < passes:
        for lines in _FETCHED_LINES:
            if lines * passes >= _STEP_LINES:
                return (lines, number * lines) if number * lines < _STEP_LINES else (0, 0)
    return 0, 0


@compiled()
def fetches_itself(turn: int, rows: int) -> int:
    """Return 1 if the first pass prefetches its own weights, 0 if the previous turn (`Parts`) has prefetched them.

    It does in the first turn, and if no other pass has two A tiles (up to 48 rows).
    """
    return 1 if turn == 0 or rows <= (2 * TOGETHER - 1) * TILE_ROWS else 0


class PackedA(NamedTuple):
    """Packed rows of a product.

    Attributes:
        rows: M.
        at: Address of packed A, at the first K step of a part.
        tile_bytes: Bytes between 16 rows of packed A and the next 16.
    """

    rows: int
    at: int
    tile_bytes: int


class HalfPanel(NamedTuple):
    """A half-panel of B, or a part of its K range.

    Attributes:
        half: Index of the half-panel: its first output is 32 * half.
        at: Address of the weights.
        steps: Complete K steps.
        rest_at: Address of the weights of an incomplete last K step, padded to a complete one; 0 if there is none.
        begins: True for the first part of K.
        ends: True for the last part: the epilogue runs.
        fetches: 1 to prefetch these weights from memory, 0 if they are in a cache.
        next_at: Address of weights of the same size to prefetch for the next turn; 0 for none.
    """

    half: int
    at: int
    steps: int
    rest_at: int
    begins: bool
    ends: bool
    fetches: int
    next_at: int


class ResultC(NamedTuple):
    """Result of a product.

    Attributes:
        bias_tag: Dtype tag of the bias, which is padded to whole panels.
        bias_at: Address of the bias of all outputs.
        at: Address of C.
        outputs: N, the row length of C.
    """

    bias_tag: npt.NDArray[Any]
    bias_at: int
    at: int
    outputs: int


@compiled()
def _write_tiles(c: ResultC, row: int, rows: int, column: int, sums_at: int) -> None:
    """Epilogue of a pass: store up to `TOGETHER` tiles of rows from `row` on, as outputs from `column` on."""
    count = min(TOGETHER * TILE_ROWS, rows - row)
    at = c.at + (row * c.outputs + column) * 2
    bias_at = c.bias_at + column * c.bias_tag.itemsize
    if column + HALF <= c.outputs:
        _write_rows(c.bias_tag[0], count, sums_at, bias_at, at, 2 * c.outputs)
        return
    # Padded outputs: the epilogue runs in place (a row is read before it is overwritten), then
    # outputs are copied.
    _write_rows(c.bias_tag[0], count, sums_at, bias_at, sums_at, SUM_BYTES)
    for each in range(count):
        copy(sums_at + each * SUM_BYTES, at + each * 2 * c.outputs, c.outputs - column)


@compiled()
def multiply_half(a: PackedA, b: HalfPanel, c: ResultC, sums_at: int) -> None:
    """Multiply all packed rows by a half-panel, or by a part of its K range.

    `sums_at` is a buffer for the accumulators of a pass, or with several parts of all passes (`Parts.sums_bytes`).
    """
    tiles = (a.rows + TILE_ROWS - 1) // TILE_ROWS
    for index in range((tiles + TOGETHER - 1) // TOGETHER):
        lines, fetch_at = 0, 0
        if b.fetches and not index:
            lines, fetch_at = _STEP_LINES, b.at + AHEAD_BYTES
        elif b.next_at:
            lines, before = fetched_by(index, tiles, b.fetches)
            fetch_at = b.next_at + before * b.steps * LINE
        at = sums_at if b.begins and b.ends else sums_at + index * PASS_BYTES
        multiply_tiles(
            min(TOGETHER, tiles - TOGETHER * index), b.steps, a.at + TOGETHER * index * a.tile_bytes,
            a.tile_bytes, b.at, b.rest_at, at, SUM_BYTES, 0 if b.begins else 1, lines, fetch_at,
        )  # fmt: skip
        if b.ends:
            _write_tiles(c, TOGETHER * TILE_ROWS * index, a.rows, b.half * HALF, at)


class Parts(NamedTuple):
    """Order of a thread's work: one part of K for some weight pieces, then the next part for these.

    A weight piece is a half-panel here, a panel in `quantized/widened.py`; a turn multiplies a piece by a part of K.

      turn        0        1        2        3        4   ..      together = 2, number = 2
      piece       0        1        0        1        2
      K part      0        0        1        1        0

    Attributes:
        steps: K steps.
        size: K steps of a part, except the last one.
        number: Parts of K.
        together: Weight pieces whose accumulators are stored from one part to the next.
        sums_bytes: Bytes of the stored accumulators of a piece; 0 with one part.
    """

    steps: int
    size: int
    number: int
    together: int
    sums_bytes: int


@compiled()
def parts_of(rows: int, inputs: int, pieces: int, halves: int) -> Parts:
    """Split K into parts for `pieces` weight pieces of `halves` half-panels: 1 here, 2 in `quantized/widened.py`."""
    steps = (inputs + STEP_INPUTS - 1) // STEP_INPUTS
    count = max((packed_bytes(rows, inputs) + _CACHE_BYTES - 1) // _CACHE_BYTES, 1)
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
    """Number of weight pieces, of `halves` half-panels each, that a thread claims at once."""
    parts = parts_of(rows, inputs, pieces, halves)
    if parts.number > 1:
        together: int = max(min(parts.together, pieces // _CLAIMS), 1)
        return together
    return max(_TOGETHER_WEIGHTS // (halves * HALF * max(inputs, 1)), 1)


@compiled()
def turn_of(turn: int, pieces: int, parts: Parts) -> Any:
    """Index of a turn's weight piece, of its K part, and of its accumulators among the stored ones."""
    group = turn // (parts.together * parts.number)
    size = min(parts.together, pieces - group * parts.together)
    within = turn - group * parts.together * parts.number
    return group * parts.together + within % size, within // size, within % size


@compiled()
def _multiply_panels(
    first: int,
    stop: int,
    rows: int,
    rows_at: int,
    weight: Any,
    outputs: int,
    out_at: int,
) -> None:
    """Multiply all packed rows by the half-panels `first` to `stop`."""
    pairs, weight_at = weight[0].inputs_unpadded // 2, weight[0].weight_at
    c = ResultC(BF16, weight[0].bias_at, out_at, outputs)
    configure_tiles(rows)
    half_bytes, whole = pairs * PAIR_BYTES, 2 * pairs // STEP_INPUTS
    first_at = weight_at + first * half_bytes
    parts = parts_of(rows, 2 * pairs, stop - first, 1)
    turns = (stop - first) * parts.number
    room = np.empty(max(parts.sums_bytes * parts.together, PASS_BYTES) + LINE, dtype=np.uint8)
    padded = np.zeros(STEP_BYTES + LINE, dtype=np.uint8)
    for turn in range(turns):
        piece, index, sums_index = turn_of(turn, stop - first, parts)
        start_step, stop_step = index * parts.size, min((index + 1) * parts.size, parts.steps)
        at, rest_at, next_at = first_at + piece * half_bytes, 0, 0
        if stop_step > whole:
            rest_at = next_line(padded)
            rest = pairs - whole * STEP_INPUTS // 2
            copy(at + whole * STEP_BYTES, rest_at, rest * 2 * HALF)
        if turn + 1 < turns:
            next_piece, next_index, _ = turn_of(turn + 1, stop - first, parts)
            next_at = first_at + next_piece * half_bytes + next_index * parts.size * STEP_BYTES
        a = PackedA(rows, rows_at + start_step * TILE_BYTES, parts.steps * TILE_BYTES)
        b = HalfPanel(
            first + piece, at + start_step * STEP_BYTES, min(stop_step, whole) - start_step, rest_at,
            start_step == 0, stop_step == parts.steps, fetches_itself(turn, rows), next_at,
        )  # fmt: skip
        multiply_half(a, b, c, next_line(room) + sums_index * parts.sums_bytes)
    release_tiles()


@kernel(*PRODUCT)
def multiply_in_tiles(
    pool: int, _tags: Any, weight: Any, rows_at: int, rows: int, outputs: int, out_at: int
) -> None:
    """Multiply rows by a weight in half-panels, on the threads of a pool (`thread_pool.spread`).

    Same arguments as `gemm.multiply`.
    """
    inputs = weight[0].inputs_unpadded
    packed = np.empty(packed_bytes(rows, inputs) + LINE, dtype=np.uint8)
    spread(pool, rows, OWN_ROWS_MAX, pack_row, (rows_at, inputs, next_line(packed)))
    halves = (outputs + HALF - 1) // HALF
    work = rows, next_line(packed), weight, outputs, out_at
    spread(pool, halves, halves_together(rows, inputs, halves, 1), _multiply_panels, work)
    packed[0] = np.uint8(0)  # keeps the buffer alive: only its address is used above
