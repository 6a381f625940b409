"""Products of rows and a weight that is widened as it is read: quantised, or bfloat16 where oneDNN has no product.

oneDNN multiplies bfloat16 on processors with AVX-512 alone; on others torch's own takes many times as long.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cpu.quantized.block_sums import (
    PLAIN,
    ROW_BLOCK,
    VECTORS,
    instructions,
)
from vsched_workers.backends.cpu.quantized.integers import multiply_whole
from vsched_workers.backends.cpu.quantized.kernel import (
    BLOCK,
    FEW_ROWS_MAX,
    FP8_FACTOR,
    HALF,
    INPUTS,
    KINDS,
    OF_BF16,
    OF_FLOAT32,
    PANEL,
    SINGLE,
    multiply,
)
from vsched_workers.backends.cpu.quantized.widened import ROWS_MIN, multiply_widened
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.backends.cpu.tiles.kernel import block_rows, has_tiles
from vsched_workers.backends.reference.packed_weights import FEW_ROWS, room_for_weights
from vsched_workers.memory.sparse_runs import at_most, is_sparse
from vsched_workers.quantized.schemes import FORMATS
from vsched_workers.quantized.weights import INT4_CENTRE, QuantizedWeight

_PACKED_BYTES = 1 << 24
"""Bytes that are laid out at once, so that beside a weight and its panels there is not much more memory."""

Kernel = Callable[[Any, int, int, int, int], None]
"""Multiplies: the dtype tag of rows, their address and number, outputs wanted, and where the results go."""


class QuantizedProduct:
    """The product by a weight in panels; a row's result does not depend on the other rows, to the bit.

    But for one thing: with tiles, many rows have another kernel than few.

    Attributes:
        step_rows_max: Most rows of a step that is one call.
        block_rows: Most rows that it is worth using for at once.
        size_bytes: Bytes of the padded weight, its scales included.
        kernel: What multiplies few rows: `multiply_whole`, or `multiply` of `kernel.py`.
        many_rows_kernel: What multiplies `many_rows_min` and more of bfloat16: `multiply_widened`, or None.
        many_rows_min: See there.
        tags: The dtype tags that it is compiled for, for rows of bfloat16.
        record: What it is told of the weight, one by one, with the bias as its address.
        has_order: Whether inputs are put in another order first.
    """

    def __init__(
        self,
        weight: QuantizedWeight | torch.Tensor,
        bias: torch.Tensor | None,
        *,
        threads: int,
        int8_rows: bool = False,
        tiles: bool = False,
    ) -> None:
        """Take a weight [out, in], of which a copy is laid out: quantised, or bfloat16.

        With `int8_rows` rows are made into 8 bits and multiplied as whole numbers, where the weight is of such. With
        `tiles` many rows of bfloat16 are multiplied in tiles.
        """
        weight = weight if isinstance(weight, QuantizedWeight) else _unscaled(weight)
        self.shape = weight.shape
        self._order = weight.order
        self.has_order = weight.order is not None
        self._kind, self._dtype = weight.kind, weight.dtype
        outputs, self._given = weight.shape
        whole = weight.group >= self._given
        fits = weight.kind in FORMATS and (whole or weight.group % ROW_BLOCK == 0)
        multiple = ROW_BLOCK if fits else INPUTS
        self._inputs = -(-self._given // multiple) * multiple
        group = self._inputs if whole else weight.group
        assert not group % INPUTS, "groups are of whole multiples"
        self._panels = _in_panels(weight, self._inputs)
        factor = FP8_FACTOR if weight.kind == "fp8" else 1.0
        unscaled = weight.kind in {"bfloat16", "float32"}
        self._scales = (
            torch.ones(1, 1, PANEL) if unscaled else _grid_in_panels(weight.scales, factor)
        )
        self._offsets = None if weight.offsets is None else _grid_in_panels(weight.offsets)
        self.size_bytes = self._panels.nbytes + self._scales.nbytes
        for more in (self._offsets, self._order):
            self.size_bytes += 0 if more is None else more.nbytes
        self._group = group
        padded = torch.zeros(len(self._panels) * PANEL)
        if bias is not None:
            padded[:outputs] = bias
        self._bias, self._enough = padded.numpy(), threads * PANEL
        self._centre = np.float32(INT4_CENTRE if weight.kind == "int4" else 0)
        pool = pool_of(threads)
        half = self._scales.dtype == torch.float16
        tags = KINDS[weight.kind], HALF if half else SINGLE
        self.kernel: Any
        self.tags: tuple[npt.NDArray[Any], ...]
        self.record: tuple[Any, ...]
        self._multiply = (
            self._whole_numbers(pool, tags)
            if fits and int8_rows
            else self._floats(pool, tags, scaled=not unscaled)
        )
        self._widened: Kernel | None = None
        self.many_rows_kernel: Any = None
        self.many_rows_min = self.step_rows_max = sys.maxsize
        self.block_rows = FEW_ROWS[-1]
        if tiles and not unscaled:
            self._widened = self._in_tiles(pool, tags)
            self.many_rows_kernel, self.many_rows_min = multiply_widened, ROWS_MIN
            self.block_rows = block_rows(*self.shape)
            if self.kernel is multiply:
                self.step_rows_max = ROWS_MIN - 1

    def _whole_numbers(self, pool: int, tags: Sequence[Any]) -> Kernel:
        """Return the kernel that makes rows into 8 bits."""
        self.kernel = multiply_whole
        sizes, addresses = self._sizes(ROW_BLOCK), self._addresses()
        self.tags = (OF_BF16, *tags, instructions())
        self.record = (self._given, addresses[0], *sizes, *addresses[1:], *self._results())
        return self._by_blocks(multiply_whole, pool, tags, sizes)

    def _floats(self, pool: int, tags: Sequence[Any], *, scaled: bool) -> Kernel:
        """Return the kernel that widens weights."""
        self.kernel = multiply
        sizes = (_block_of(self._group), self._group, self._scales.itemsize if scaled else 0)
        half_bytes = 1 if self._kind == "int4" else 2 * self._panels.itemsize
        addresses = self._addresses()
        inputs = self._given, self._inputs
        self.tags = (OF_BF16, *tags)
        self.record = (
            *(*inputs, addresses[0], half_bytes, *sizes, *addresses[1:]),
            *(*self._results(), self._centre),
        )

        def call(row_tag: Any, rows_at: int, count: int, outputs: int, result_at: int) -> None:
            multiply(
                pool, row_tag, *tags, int(count > FEW_ROWS_MAX), rows_at, count, self._given,
                self._inputs, addresses[0], half_bytes, sizes, addresses[1], addresses[2], outputs,
                self._bias, result_at, self._centre,
            )  # fmt: skip

        return call

    def _in_tiles(self, pool: int, tags: Sequence[Any]) -> Kernel:
        """Return the kernel that widens weights for many rows of bfloat16, and multiplies in tiles."""
        assert has_tiles(), "a process asks for them first"
        unit = ROW_BLOCK if self._group % ROW_BLOCK == self._inputs % ROW_BLOCK == 0 else INPUTS
        return self._by_blocks(multiply_widened, pool, tags, self._sizes(unit))

    def _by_blocks(
        self, kernel: Any, pool: int, tags: Sequence[Any], sizes: tuple[int, ...]
    ) -> Kernel:
        """Return a kernel that is told of the weight's blocks, which takes what is the same for any weight."""
        tag, addresses = instructions(), self._addresses()

        def call(row_tag: Any, rows_at: int, count: int, outputs: int, result_at: int) -> None:
            # By position: numba takes microseconds to sort out names.
            kernel(
                pool, row_tag, *tags, tag, rows_at, count, self._given, addresses[0], sizes,
                addresses[1], addresses[2], outputs, self._bias, result_at,
            )  # fmt: skip

        return call

    def _sizes(self, block: int) -> tuple[int, int, int, int, int]:
        """Return bytes of a panel, its blocks of so many inputs, those of a group, bytes of its scales, and vectors."""
        return (
            self._panels[0].nbytes,
            self._inputs // block,
            self._group // block,
            self._scales[0, 0].nbytes,
            VECTORS,
        )

    def _addresses(self) -> tuple[int, int, int]:
        offsets_at = 0 if self._offsets is None else self._offsets.data_ptr()
        return self._panels.data_ptr(), self._scales.data_ptr(), offsets_at

    def _results(self) -> tuple[int, int]:
        """Return the number of outputs, and where the bias lies."""
        return self.shape[0], self._bias.ctypes.data

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [..., in] of bfloat16 or float32; returns [..., out] of that type."""
        if self._order is not None:
            rows = rows.index_select(-1, self._order)
        rows = rows.contiguous()
        shape = (*rows.shape[:-1], self.shape[0])
        # What is left out must not be nonsense: tokens are drawn from logits.
        result = rows.new_zeros(shape) if is_sparse() else rows.new_empty(shape)
        count, singles = rows.numel() // self._given, rows.dtype == torch.float32
        widened = None if singles or count < self.many_rows_min else self._widened
        multiply = widened or self._multiply
        multiply(
            OF_FLOAT32 if singles else OF_BF16,
            rows.data_ptr(),
            count,
            at_most(self.shape[0], self._enough),
            result.data_ptr(),
        )
        return result

    def rows_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, as of an embedding; indices int64 [n], returns [n, in]."""
        assert self._kind in FORMATS or self._kind == "fp8", "others have no scales"
        assert self._order is None, "embeddings are quantised here, in order"
        panel, place = indices // PANEL, indices % PANEL
        groups = torch.arange(self._given) // self._group
        together = 4 if self._kind in FORMATS else 1
        values = self._panels.view(len(self._panels), -1, PANEL, together)[panel, :, place]
        scales = self._scales[panel, :, place].float()[:, groups]
        offsets = None if self._offsets is None else self._offsets[panel, :, place].float()
        if self._kind == "int4":
            values = torch.stack((values & 15, values >> 4), -2)
        values = values.flatten(1)[:, : self._given]
        if self._kind == "fp8":
            values, scales = values.view(torch.float8_e4m3fn), scales / FP8_FACTOR
        rows = (values.float() - float(self._centre)) * scales
        return (rows if offsets is None else rows + offsets[:, groups]).to(self._dtype)


def makes_int8_rows(activations: str, dtype: torch.dtype) -> bool:
    """Return whether rows of a type are made into 8 bits, as a configuration asks for: `auto`, `float` or `int8`.

    By itself not in float32: who asks for that wants the same tokens whatever rows are computed together, and a last
    bit of attention can move a value of 8 bits by one.
    """
    if activations == "auto":
        return dtype == torch.bfloat16 and instructions() is not PLAIN
    return activations == "int8"


def widens_in_tiles(settings: WorkerSettings, dtype: torch.dtype) -> bool:
    """Return whether many rows of a type are multiplied in tiles, with weights widened.

    Not where rows of 8 bits are asked for, nor where a row's bits must not depend on how many there are.
    """
    wanted = settings.activations != "int8" and not settings.deterministic
    return wanted and dtype == torch.bfloat16 and has_tiles()


def _block_of(group: int) -> int:
    """Return the inputs of a block: as many as divide a group, or what is most where a row is one group."""
    if group <= BLOCK:
        return group
    return next(each for each in range(BLOCK, 0, -INPUTS) if not group % each or each == INPUTS)


def _unscaled(weight: torch.Tensor) -> QuantizedWeight:
    """Return a weight in bfloat16 or float32 as one that is scaled by one."""
    return QuantizedWeight(
        kind=str(weight.dtype).removeprefix("torch."),
        values=weight.detach(),
        scales=torch.empty(0),
        group=weight.shape[1],
        inputs=weight.shape[1],
        dtype=weight.dtype,
    )


def _in_panels(weight: QuantizedWeight, inputs: int) -> torch.Tensor:
    """Return the values of a weight in panels, as the kernel reads them."""
    outputs, _ = weight.shape
    panels, values = -(-outputs // PANEL), weight.values
    quads = weight.kind in FORMATS
    columns = inputs // 2 if weight.kind == "int4" else inputs
    made = room_for_weights((panels, columns * PANEL), values.dtype)
    step = max(_PACKED_BYTES // (inputs * PANEL), 1)
    for first in range(0, panels, step):
        some = values[first * PANEL : (first + step) * PANEL]
        bits = some.view(torch.uint8) if values.dtype.itemsize == 1 else some
        filling = (0, columns - bits.shape[1], 0, -len(bits) % PANEL)
        padded = functional.pad(bits, filling).view(values.dtype).unflatten(0, (-1, PANEL))
        if weight.kind == "int4":
            padded = _eights(padded)
        if quads:
            padded = padded.unflatten(2, (-1, 4))
        made[first : first + step] = padded.transpose(1, 2).flatten(1)
    return made


def _eights(pairs: torch.Tensor) -> torch.Tensor:
    """Return bytes of two neighbouring inputs, [..., in / 2], as words of eight: four lower halves, four upper ones."""
    values: Any = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    values = values.unflatten(-1, (-1, 2, 4))
    words: torch.Tensor = (values[..., 0, :] | values[..., 1, :] << 4).flatten(-2)
    return words


def _grid_in_panels(grid: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return scales or offsets in panels, [panels, groups, PANEL]."""
    grid = grid.float() * factor if factor != 1.0 else grid
    padded: Any = functional.pad(grid, (0, 0, 0, -len(grid) % PANEL))
    panels = padded.unflatten(0, (-1, PANEL)).transpose(1, 2)
    return room_for_weights(panels.shape, panels.dtype).copy_(panels)
