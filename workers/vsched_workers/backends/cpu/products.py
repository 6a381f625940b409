"""Products of rows and a weight that lies in panels, as `kernels/gemm.py` reads it.

With AMX, any number of rows is multiplied in tiles (`tiles/kernel.py`). Without, oneDNN takes over from some number
of bfloat16 rows on. So there is one copy of the weight, which oneDNN has packed, and the kernel reads it there. Where
float32 is faster, oneDNN is not needed, and the weight is packed here. Where oneDNN has no product of bfloat16 at all,
all rows are multiplied by `quantized/products.py`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from vsched.errors import ConfigError
from vsched_workers.backends.cpu.kernels.bf16 import BF16, FLOAT32
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

INPUTS_MAX = 4096
"""Two panels of more inputs do not fit into the second cache, which the next one is fetched into."""

BF16_ROWS_MAX = 128
"""Most rows that are multiplied as bfloat16: with 256, which leave the cache between two panels, oneDNN is as fast."""

PADDING_SHARE_MAX = 1 / 8
"""The largest share of a weight that may be padding of its last panel, or half: it is multiplied as the rest is."""

COMPARED_PAIRS = 64
"""Pairs of inputs at each end of a panel by which its layout is told."""


class PanelProduct:
    """The product by a weight [out, in] in panels; a row's result does not depend on the other rows.

    Attributes:
        rows_max: Most rows that it is worth using for.
        step_rows_max: Most rows of a step that is one call: as many.
        block_rows: Most rows that it is worth using for at once.
        packed: The weight as oneDNN packs it, for more rows than that.
        size_bytes: Bytes of the padded weight: to whole panels, or with tiles to halves.
        shape: Its outputs and inputs.
        kernel: What multiplies, `gemm.multiply` or, in tiles, `multiply_in_tiles`.
        many_rows_kernel: None: all rows have that one.
        many_rows_min: No number is many.
        tags: What the kernel is compiled for: the dtype tag of its operands.
        record: Half of its inputs, where the weight lies, its outputs, and where the bias lies.
    """

    many_rows_kernel: Any = None
    many_rows_min = sys.maxsize

    def __init__(
        self,
        panels: torch.Tensor,
        address: int,
        shape: torch.Size,
        bias: torch.Tensor | None,
        threads: int,
        *,
        rows_max: int = sys.maxsize,
        tiles: bool = False,
    ) -> None:
        """Take a weight of this shape, whose panels lie at an address in memory of `panels`.

        With `tiles` it is multiplied in tiles, and halves of panels lie there.
        """
        self.rows_max = self.step_rows_max = rows_max
        self.block_rows = block_rows(*shape) if tiles else FEW_ROWS[-1]
        self.packed = None if rows_max == sys.maxsize else panels
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
    None where it does not pay, or the weight is too large, or does not lie in panels once it is packed.
    """
    if isinstance(weight, QuantizedWeight) or not packs(weight.dtype):
        return QuantizedProduct(weight, bias, threads=threads, int8_rows=int8_rows, tiles=tiles)
    outputs, inputs = weight.shape
    in_tiles = has_tiles()
    if inputs % 2 or not runs_here() or (inputs > INPUTS_MAX and not in_tiles):
        return None
    if in_tiles or operand() is FLOAT32:
        width = HALF if in_tiles else PANEL
        if -outputs % width > PADDING_SHARE_MAX * outputs:
            return None
        packed = _pack(weight, width)
        return PanelProduct(*packed, weight.shape, bias, threads, tiles=in_tiles)
    found = _pack_with_onednn(weight)
    if found is None:
        return None
    return PanelProduct(*found, weight.shape, bias, threads, rows_max=BF16_ROWS_MAX)


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


def _pack_with_onednn(weight: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Return a weight as oneDNN packs it and the address of its panels; None if it does not lie in such."""
    operations: Any = torch.ops.mkldnn
    if weight.shape[0] % PANEL:
        return None
    packed = operations._reorder_linear_weight(weight)  # noqa: SLF001  # torch offers it under this name only
    if operations._nbytes(packed) != weight.nbytes:  # noqa: SLF001
        return None
    address: int = operations.data_ptr(packed)
    if address % LINE:
        return None
    return (packed, address) if _lies_in_panels(address, weight) else None


def _lies_in_panels(address: int, weight: torch.Tensor) -> bool:
    """Compare the ends of some panels with what they should hold.

    oneDNN does not document its layout. Every weight is compared, since one of equal values would tell nothing for
    others of its shape.
    """
    outputs, inputs = weight.shape
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint16))
    found = np.ctypeslib.as_array(pointer, (outputs // PANEL, inputs // 2, PANEL, 2))
    last = len(found) - 1
    ends = slice(0, COMPARED_PAIRS), slice(-COMPARED_PAIRS, None)
    return all(
        np.array_equal(found[at, pairs], _panel(weight, at)[pairs])
        for at in {0, last // 2, last}
        for pairs in ends
    )


def _panel(weight: torch.Tensor, index: int) -> npt.NDArray[np.uint16]:
    """Return one panel of a weight, [in / 2, PANEL, 2]."""
    rows = weight[index * PANEL : (index + 1) * PANEL].detach()
    pairs: npt.NDArray[np.uint16] = rows.view(torch.uint16).numpy().reshape(PANEL, -1, 2)
    return pairs.transpose(1, 0, 2)
