"""Products of rows and a weight that is widened as it is read: quantised, or bfloat16 where oneDNN has no product.

oneDNN multiplies bfloat16 on processors with AVX-512 alone; on others torch's own takes many times as long.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from vsched_workers.backends.cpu.decode_attention import use_threads
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
from vsched_workers.memory.sparse_runs import at_most, is_sparse
from vsched_workers.quantized.schemes import FORMATS
from vsched_workers.quantized.weights import INT4_CENTRE, QuantizedWeight

_PACKED_BYTES = 1 << 24
"""Bytes that are laid out at once, so that beside a weight and its panels there is not much more memory."""


class QuantizedProduct:
    """The product by a weight in panels; a row's result does not depend on the other rows, to the bit.

    Attributes:
        rows_max: Most rows that it is worth using for: any number.
        packed: No weight for more rows than that.
        size_bytes: Bytes of the padded weight, its scales included.
    """

    rows_max: int = sys.maxsize
    packed: torch.Tensor | None = None

    def __init__(
        self, weight: QuantizedWeight | torch.Tensor, bias: torch.Tensor | None, *, threads: int
    ) -> None:
        """Take a weight [out, in], of which a copy is laid out: quantised, or bfloat16."""
        weight = weight if isinstance(weight, QuantizedWeight) else _unscaled(weight)
        self.shape = weight.shape
        self._kind, self._dtype = weight.kind, weight.dtype
        outputs, self._given = weight.shape
        whole = weight.group >= self._given
        self._inputs = -(-self._given // INPUTS) * INPUTS
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
        self.size_bytes += 0 if self._offsets is None else self._offsets.nbytes
        self._group = group
        padded = torch.zeros(len(self._panels) * PANEL)
        if bias is not None:
            padded[:outputs] = bias
        use_threads(threads)
        kernel: Callable[..., None] = multiply.parallel if threads > 1 else multiply.serial
        half = self._scales.dtype == torch.float16
        self._of_kind = functools.partial(kernel, threads)
        self._tags = KINDS[weight.kind], HALF if half else SINGLE
        # By position: numba takes microseconds to sort out names.
        self._weight = (
            self._panels.data_ptr(),
            1 if weight.kind == "int4" else 2 * self._panels.itemsize,
            (_block_of(group), group, 0 if unscaled else self._scales.itemsize),
            self._scales.data_ptr(),
            0 if self._offsets is None else self._offsets.data_ptr(),
        )
        self._bias, self._enough = padded.numpy(), threads * PANEL
        self._centre = np.float32(INT4_CENTRE if weight.kind == "int4" else 0)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [..., in] of bfloat16 or float32; returns [..., out] of that type."""
        rows = rows.contiguous()
        count = rows.numel() // self._given
        shape = (*rows.shape[:-1], self.shape[0])
        # What is left out must not be nonsense: tokens are drawn from logits.
        result = rows.new_zeros(shape) if is_sparse() else rows.new_empty(shape)
        self._of_kind(
            OF_FLOAT32 if rows.dtype == torch.float32 else OF_BF16,
            *self._tags,
            int(count > FEW_ROWS_MAX),
            rows.data_ptr(),
            count,
            self._given,
            self._inputs,
            *self._weight,
            at_most(self.shape[0], self._enough),
            self._bias,
            result.data_ptr(),
            self._centre,
        )
        return result

    def rows_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, as of an embedding; indices int64 [n], returns [n, in]."""
        assert self._kind in FORMATS or self._kind == "fp8", "others have no scales"
        panel, place = indices // PANEL, indices % PANEL
        groups = torch.arange(self._given) // self._group
        values = self._panels[panel, :, place]
        scales = self._scales[panel, :, place].float()[:, groups]
        offsets = None if self._offsets is None else self._offsets[panel, :, place].float()
        if self._kind == "int4":
            values = torch.stack((values & 15, values >> 4), -1).flatten(1)
        values = values[:, : self._given]
        if self._kind == "fp8":
            values, scales = values.view(torch.float8_e4m3fn), scales / FP8_FACTOR
        rows = (values.float() - float(self._centre)) * scales
        return (rows if offsets is None else rows + offsets[:, groups]).to(self._dtype)


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
    """Return the values of a weight in panels, [panels, inputs, PANEL], of int4 half as many inputs."""
    outputs, given = weight.shape
    pairs = 2 if weight.kind == "int4" else 1
    panels = -(-outputs // PANEL)
    dtype = weight.values.dtype
    made = torch.empty(panels, inputs // pairs, PANEL, dtype=dtype)
    step = max(_PACKED_BYTES // (inputs * PANEL), 1)
    missing = (
        (inputs - given) // pairs
        if given % pairs == 0
        else inputs // pairs - weight.values.shape[1]
    )
    for first in range(0, panels, step):
        values = weight.values[first * PANEL : (first + step) * PANEL]
        short = -len(values) % PANEL
        bits = values.view(torch.uint8) if dtype.itemsize == 1 else values
        padded = functional.pad(bits, (0, missing, 0, short)).view(dtype)
        made[first : first + step] = padded.unflatten(0, (-1, PANEL)).transpose(1, 2)
    return made


def _grid_in_panels(grid: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return scales or offsets in panels, [panels, groups, PANEL]."""
    grid = grid.float() * factor if factor != 1.0 else grid
    padded: Any = functional.pad(grid, (0, 0, 0, -len(grid) % PANEL))
    made: torch.Tensor = padded.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    return made
