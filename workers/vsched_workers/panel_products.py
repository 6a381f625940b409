"""What multiplies rows by a weight that oneDNN has packed, where it lies as `panel_kernels.py` reads it."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vsched_workers import panel_kernels
from vsched_workers.numba_attention import use_threads
from vsched_workers.numba_vectors import LINE
from vsched_workers.operand_choice import SINGLE, operand, pays_here
from vsched_workers.panel_kernels import PANEL

INPUTS_MAX = 4096
"""Two panels of more inputs do not fit into the second cache, which the next one is fetched into."""

PAIR_ROWS_MAX = 128
"""Most rows that are multiplied by pairs: with 256, which leave the cache between two panels, oneDNN is as fast."""


class PanelProduct:
    """Multiplies by a packed weight [out, in] in place; the result does not depend on how many rows there are.

    Attributes:
        rows_max: Most rows that it is worth using for.
    """

    def __init__(
        self, address: int, shape: torch.Size, bias: torch.Tensor | None, threads: int
    ) -> None:
        self.rows_max = sys.maxsize if operand() is SINGLE else PAIR_ROWS_MAX
        self._address = address
        self._out, self._in = shape
        self._bias = torch.zeros(self._out, dtype=torch.bfloat16) if bias is None else bias
        self._bias_at = self._bias.data_ptr()
        # By place: numba takes microseconds to sort out names.
        self._multiply = functools.partial(panel_kernels.multiply, operand())
        if threads > 1:
            use_threads(threads)
            self._multiply = functools.partial(panel_kernels.multiply_parallel, threads, operand())

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [..., in]; returns [..., out]."""
        rows = rows.contiguous()
        result = rows.new_empty(*rows.shape[:-1], self._out)
        self._multiply(
            rows.data_ptr(),
            rows.numel() // self._in,
            self._in // 2,
            self._address,
            self._out // PANEL,
            self._bias_at,
            result.data_ptr(),
        )
        return result


def panel_product(
    packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, threads: int
) -> PanelProduct | None:
    """Return what multiplies by a packed weight, which has to outlive it.

    None where it does not pay, or the weight does not lie in panels or is too large.
    """
    outputs, inputs = weight.shape
    fits = outputs % PANEL == 0 and inputs % 2 == 0 and inputs <= INPUTS_MAX
    if not fits or not pays_here():
        return None
    operations: Any = torch.ops.mkldnn
    if operations._nbytes(packed) != weight.nbytes:  # noqa: SLF001  # torch offers it under this name only
        return None
    address: int = operations.data_ptr(packed)
    if address % LINE or not _lies_in_panels(address, weight):
        return None
    return PanelProduct(address, weight.shape, bias, threads)


def _lies_in_panels(address: int, weight: torch.Tensor) -> bool:
    """Compare some panels with what they hold if oneDNN, which does not tell, packs as `panel_kernels.py` reads."""
    outputs, inputs = weight.shape
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint16))
    found = np.ctypeslib.as_array(pointer, (outputs // PANEL, inputs // 2, PANEL, 2))
    last = len(found) - 1
    return all(np.array_equal(found[at], _panel(weight, at)) for at in {0, last // 2, last})


def _panel(weight: torch.Tensor, index: int) -> npt.NDArray[np.uint16]:
    """Return one panel of a weight, [in / 2, 64, 2]."""
    rows = weight[index * PANEL : (index + 1) * PANEL].detach().contiguous()
    pairs: npt.NDArray[np.uint16] = rows.view(torch.uint16).numpy().reshape(PANEL, -1, 2)
    return pairs.transpose(1, 0, 2)
