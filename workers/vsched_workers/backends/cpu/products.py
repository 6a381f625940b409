"""GEMM with a packed weight: bfloat16 pairs in panels, tiles with AMX, or weights that are widened as they are read."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy.typing as npt
import torch
from torch.nn import functional

from vsched_workers.backends.cpu.kernels.gemm import PANEL, multiply
from vsched_workers.backends.cpu.kernels.simd import LINE, has_bf16_dot
from vsched_workers.backends.cpu.quantized.products import QuantizedProduct
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.backends.cpu.tiles.kernel import HALF, has_tiles, multiply_in_tiles
from vsched_workers.backends.reference.packed_weights import PackedProduct, Weight, room_for_weights
from vsched_workers.memory.sparse_runs import at_most


class PanelProduct(PackedProduct):
    """GEMM with a packed weight [out, in] of bfloat16.

    Attributes:
        step_rows_max: Maximum rows that one call of a compiled step may multiply: unlimited.
        size_bytes: Bytes of the padded weight: whole panels, or half-panels with tiles.
        kernel: Compiled kernel: `gemm.multiply`, or `multiply_in_tiles`.
        many_rows_kernel: None: one kernel for all numbers of rows.
        tags: None: the kernel has one variant.
        record: Arguments that describe the weight: half its inputs, its address, its outputs, the address of the
            bias.
    """

    many_rows_kernel: Any = None
    step_rows_max = sys.maxsize

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, threads: int, *, tiles: bool = False
    ) -> None:
        """Pack a copy of a weight with an even number of inputs.

        With `tiles` the weight is packed into half-panels and multiplied in tiles.
        """
        self._panels = _pack(weight, HALF if tiles else PANEL)
        self._out, inputs = self.shape = (weight.shape[0], weight.shape[1])
        self._enough = threads * PANEL
        self.size_bytes = self._panels.nbytes
        self._bias = torch.zeros(-(-self._out // PANEL) * PANEL, dtype=torch.bfloat16)
        if bias is not None:
            self._bias[: self._out] = bias
        self._bias_at = self._bias.data_ptr()
        self.kernel: Any = multiply_in_tiles if tiles else multiply
        self.tags: tuple[npt.NDArray[Any], ...] = ()
        self.record = (inputs // 2, self._panels.data_ptr(), self._out, self._bias_at)
        # Positional arguments: numba takes microseconds to sort keyword arguments.
        self._multiply = functools.partial(self.kernel, pool_of(threads))

    def multiply_rows(self, dtype: torch.dtype, rows_at: int, count: int, result_at: int) -> None:
        assert dtype == torch.bfloat16, "rows and weight must be bfloat16"
        pairs, weight_at, outputs, bias_at = self.record
        wanted = at_most(outputs, self._enough)
        self._multiply(rows_at, count, pairs, weight_at, wanted, bias_at, result_at)


def make_product(
    weight: Weight,
    bias: torch.Tensor | None,
    *,
    threads: int,
    int8_activations: bool = False,
    tiles: bool = False,
    deterministic: bool = False,
) -> PanelProduct | QuantizedProduct:
    """Return the product by a weight, of which it packs a copy.

    `int8_activations` and `tiles` are as in `QuantizedProduct`; bfloat16 weights use tiles whenever the processor has
    them. With `deterministic` no product uses tiles.
    """
    tiles = tiles and not deterministic
    if isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16:
        in_tiles = has_tiles() and not deterministic
        if (has_bf16_dot() or in_tiles) and weight.shape[1] % 2 == 0:
            return PanelProduct(weight, bias, threads, tiles=in_tiles)
    return QuantizedProduct(
        weight, bias, threads=threads, int8_activations=int8_activations, tiles=tiles
    )


def _pack(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Pack a weight into panels of `width` outputs, the last one padded with zeros.

      weight [N, K]                            packed [N / width, K / 2, width, 2]

            k0   k1   k2   k3  ..                          n0      n1      n2     ..   n(width - 1)
      n0    a    b    c    d                   k0, k1    a  b    e  f    i  j
      n1    e    f    g    h           ->      k2, k3    c  d    g  h    k  l
      n2    i    j    k    l                     ..
      ..                                       then the panel of outputs width .. 2 width - 1

    A line of this diagram is `width` / 16 vectors of 64 bytes.
    """
    outputs, inputs = weight.shape
    weight = weight.detach()
    if missing := -outputs % width:  # padding copies, even if nothing is added
        weight = functional.pad(weight, (0, 0, 0, missing))
    pairs = weight.contiguous().view(torch.int32).view(-1, width, inputs // 2)
    panels = room_for_weights((len(pairs), inputs // 2, width, 2), weight.dtype)
    # One by one: torch transposes matrices in blocks, four times as fast as a tensor with more dimensions.
    for panel, rows in zip(panels.view(torch.int32).squeeze(-1), pairs, strict=True):
        panel.copy_(rows.t())
    assert not panels.data_ptr() % LINE, "panels must be aligned to cache lines"
    return panels
