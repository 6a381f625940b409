"""Operands of attention with many rows, all that the processor supports, and arguments of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from vsched_workers.backends.cpu import attention
from vsched_workers.backends.cpu.kernels.bf16 import BF16, FLOAT32
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
from vsched_workers.backends.cpu.tiles.kernel import has_tiles

Operand = npt.NDArray[Any] | None
"""A dtype tag; None: bfloat16 in tiles."""

needs_bf16_dot = pytest.mark.skipif(not has_bf16_dot(), reason="the processor has no VDPBF16PS")
needs_tiles = pytest.mark.skipif(not has_tiles(), reason="the processor has no tiles")

OPERANDS = [
    pytest.param(BF16, marks=needs_bf16_dot, id="bf16"),
    pytest.param(FLOAT32, id="float32"),
    pytest.param(None, marks=needs_tiles, id="tiles"),
]


def use_operand(patch: pytest.MonkeyPatch, operand: Operand) -> None:
    """Use these operands for attention with many rows."""
    patch.setattr(attention, "operand", lambda: operand)
    patch.setattr(attention, "has_tiles", lambda: operand is None)


def with_operand(operand: Operand, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Bind an attention kernel to these operands."""

    def call(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            use_operand(patch, operand)
            return kernel(*arguments)

    return call


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bits(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    """View a bfloat16 tensor as kernels do."""
    array: npt.NDArray[np.uint16] = tensor.view(torch.uint16).numpy()
    return array
