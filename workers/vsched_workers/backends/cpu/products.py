"""Products of rows and a weight that lies in panels, as `kernels/gemm.py` reads it.

With AMX, rows are multiplied in tiles (`tiles/kernel.py`). Where oneDNN has no product of bfloat16 at all, all rows are
multiplied by `quantized/products.py`.
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
from vsched_workers.backends.cpu.operand_choice import operand, runs_here
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
"""The largest share of a weight that may be padding of its last panel, or half: it is multiplied as the rest is."""


class PanelProduct:
    """The product by a weight [out, in] in panels; a row's result does not depend on the other rows.

    Attributes:
        step_rows_max: Most rows of a step that is one call: any number.
        block_rows: Most rows that it is worth using for at once.
        size_bytes: Bytes of the padded weight: to whole panels, or with tiles to halves.
        shape: Its outputs and inputs.
        kernel: What multiplies, `gemm.multiply` or, in tiles, `multiply_in_tiles`.
        many_rows_kernel: None: all rows have that one.
        many_rows_min: No number is many.
        tags: What the kernel is compiled for: the dtype tag of its operands.
        record: Half of its inputs, where the weight lies, its outputs, and where the bias lies.
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
        """Take a weight of this shape, whose panels lie at an address in memory of `panels`.

        With `tiles` it is multiplied in tiles, and halves of panels lie there.
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
        # By position: numba takes microseconds to sort out names.
        tag = BF16 if tiles else operand()
        self.tags: tuple[npt.NDArray[Any], ...] = (tag,)
        self._multiply = functools.partial(self.kernel, pool_of(threads), tag)
        self.record = (self._in // 2, address, self._out, self._bias_at)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [..., in]; returns [..., out]."""
        rows = rows.contiguous()
        shape = (*rows.shape[:-1], self._out)
        # What is left out must not be nonsense: tokens are drawn from logits.
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
    int8_rows: bool = False,
    tiles: bool = False,
) -> CustomProduct | None:
    """Return the product by a weight, of which it holds a copy.

    `int8_rows` and `tiles` are as `QuantizedProduct` has them; bfloat16 is multiplied in tiles wherever there are any.
    None where it does not pay.
    """
    if isinstance(weight, QuantizedWeight) or not packs(weight.dtype):
        return QuantizedProduct(weight, bias, threads=threads, int8_rows=int8_rows, tiles=tiles)
    outputs, inputs = weight.shape
    in_tiles = has_tiles()
    width = HALF if in_tiles else PANEL
    if inputs % 2 or not runs_here() or -outputs % width > PADDING_SHARE_MAX * outputs:
        return None
    return PanelProduct(*_pack(weight, width), weight.shape, bias, threads, tiles=in_tiles)


def deterministic_product(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    *,
    threads: int,
    int8_rows: bool = False,
    tiles: bool = False,
) -> CustomProduct:
    """Return the product by a weight that is used for any number of rows, whether that is the fastest or not.

    It is not in tiles, whatever is asked for.

    Raises:
        ConfigError: When the weight has an odd number of inputs.
    """
    if isinstance(weight, QuantizedWeight):
        return QuantizedProduct(weight, bias, threads=threads, int8_rows=int8_rows)
    if weight.shape[1] % 2:
        raise ConfigError(
            f"model.deterministic: a weight has {weight.shape[1]} inputs, an odd number. Remedy: set it to false."
        )
    return PanelProduct(*_pack(weight), weight.shape, bias, threads)


def _pack(weight: torch.Tensor, width: int = PANEL) -> tuple[torch.Tensor, int]:
    """Return a weight in panels of so many outputs, the last one padded with zeros, and their address."""
    outputs, inputs = weight.shape
    padded = functional.pad(weight.detach(), (0, 0, 0, -outputs % width))
    whole = padded.view(-1, width, inputs // 2, 2).transpose(1, 2)
    panels = room_for_weights(whole.shape, weight.dtype).copy_(whole)
    address = panels.data_ptr()
    assert not address % LINE, "it begins at a line"
    return panels, address
