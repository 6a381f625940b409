"""GEMM with a weight in panels, as `kernels/gemm.py` reads it.

With AMX, products are computed in tiles (`tiles/kernel.py`). If oneDNN has no bfloat16 product on this processor,
`quantized/products.py` computes all products.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy.typing as npt
import torch
from torch.nn import functional

from vsched.errors import ConfigError
from vsched_workers.backends.cpu.kernels.bf16 import BF16
from vsched_workers.backends.cpu.kernels.gemm import PANEL, multiply
from vsched_workers.backends.cpu.kernels.simd import LINE
from vsched_workers.backends.cpu.operand_choice import operand, supports_bf16
from vsched_workers.backends.cpu.quantized.products import QuantizedProduct
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.backends.cpu.tiles.kernel import HALF, block_rows, has_tiles, multiply_in_tiles
from vsched_workers.backends.reference.packed_weights import (
    FEW_ROWS,
    CustomProduct,
    packs,
    room_for_weights,
)
from vsched_workers.memory.sparse_runs import at_most, is_sparse
from vsched_workers.quantized.weights import QuantizedWeight

PADDING_SHARE_MAX = 1 / 8
"""Maximum share of padding in the packed weight: padding takes the same time as outputs."""


class PanelProduct:
    """GEMM with a packed weight [out, in]; the result of a row does not depend on the other rows.

    Attributes:
        step_rows_max: Maximum rows that one call of a compiled step may multiply: unlimited.
        block_rows: Maximum rows worth multiplying at once.
        size_bytes: Bytes of the padded weight: whole panels, or half-panels with tiles.
        shape: Outputs and inputs of the weight.
        kernel: Compiled kernel: `gemm.multiply`, or `multiply_in_tiles`.
        many_rows_kernel: None: one kernel for all numbers of rows.
        many_rows_min: Unlimited, since there is no kernel for many rows.
        tags: Arguments that select the compiled variant: the dtype tag of the operands.
        record: Arguments that describe the weight: half its inputs, its address, its outputs, the address of the
            bias.
    """

    many_rows_kernel: Any = None
    many_rows_min = step_rows_max = sys.maxsize

    def __init__(
        self,
        panels: torch.Tensor,
        address: int,
        shape: torch.Size,
        bias: torch.Tensor | None,
        threads: int,
        *,
        tiles: bool = False,
    ) -> None:
        """Take a packed weight of this shape, at an address within the tensor `panels`.

        With `tiles` the weight is packed into half-panels and multiplied in tiles.
        """
        self.block_rows = block_rows(*shape) if tiles else FEW_ROWS[-1]
        self._panels = panels
        self._address = address
        self.shape = shape
        self._out, self._in = shape
        self._enough = threads * PANEL
        whole = -(-self._out // PANEL) * PANEL
        self.size_bytes = (len(panels) * HALF if tiles else whole) * self._in * 2
        self._bias = torch.zeros(whole, dtype=torch.bfloat16)
        if bias is not None:
            self._bias[: self._out] = bias
        self._bias_at = self._bias.data_ptr()
        self.kernel: Any = multiply_in_tiles if tiles else multiply
        # Positional arguments: numba takes microseconds to sort keyword arguments.
        tag = BF16 if tiles else operand()
        self.tags: tuple[npt.NDArray[Any], ...] = (tag,)
        self._multiply = functools.partial(self.kernel, pool_of(threads), tag)
        self.record = (self._in // 2, address, self._out, self._bias_at)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [..., in]; returns [..., out]."""
        rows = rows.contiguous()
        shape = (*rows.shape[:-1], self._out)
        # Skipped outputs must be defined numbers: tokens are sampled from logits.
        result = rows.new_zeros(shape) if is_sparse() else rows.new_empty(shape)
        self._multiply(
            rows.data_ptr(),
            rows.numel() // self._in,
            self._in // 2,
            self._address,
            at_most(self._out, self._enough),
            self._bias_at,
            result.data_ptr(),
        )
        return result


def panel_product(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    *,
    threads: int,
    int8_activations: bool = False,
    tiles: bool = False,
) -> CustomProduct | None:
    """Return the product by a weight, of which it packs a copy.

    Returns None if torch's own product is to be preferred: with an odd number of inputs, too much padding, or a
    processor without suitable instructions. `int8_activations` and `tiles` are as in `QuantizedProduct`; bfloat16
    weights use tiles whenever the processor has them.
    """
    if isinstance(weight, QuantizedWeight) or not packs(weight.dtype):
        return QuantizedProduct(
            weight, bias, threads=threads, int8_activations=int8_activations, tiles=tiles
        )
    outputs, inputs = weight.shape
    in_tiles = has_tiles()
    width = HALF if in_tiles else PANEL
    if inputs % 2 or not supports_bf16() or -outputs % width > PADDING_SHARE_MAX * outputs:
        return None
    return PanelProduct(*_pack(weight, width), weight.shape, bias, threads, tiles=in_tiles)


def deterministic_product(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    *,
    threads: int,
    int8_activations: bool = False,
    tiles: bool = False,
) -> CustomProduct:
    """Return a product with one kernel for any number of rows, even if another would be faster.

    It never uses tiles, whatever `tiles` says.

    Raises:
        ConfigError: The weight has an odd number of inputs.
    """
    if isinstance(weight, QuantizedWeight):
        return QuantizedProduct(weight, bias, threads=threads, int8_activations=int8_activations)
    if weight.shape[1] % 2:
        raise ConfigError(
            f"model.deterministic: a weight has {weight.shape[1]} inputs, an odd number. Remedy: set it to false."
        )
    return PanelProduct(*_pack(weight), weight.shape, bias, threads)


def _pack(weight: torch.Tensor, width: int = PANEL) -> tuple[torch.Tensor, int]:
    """Pack a weight into panels of `width` outputs, the last one padded with zeros; returns it and its address.

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
    address = panels.data_ptr()
    assert not address % LINE, "panels must be aligned to cache lines"
    return panels, address
