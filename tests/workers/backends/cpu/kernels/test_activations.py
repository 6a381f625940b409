"""Activations of the CPU kernels against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("numba")

from tests.workers.backends.cpu.kernels.operands import draw
from vsched_workers.backends.cpu.kernels import activation
from vsched_workers.backends.cpu.kernels.activation import gelu, gelu_tanh, swiglu
from vsched_workers.backends.cpu.threads import pool_of


def test_loops_of_activations_have_names_of_their_own() -> None:
    """Stored code is linked by name: of two loops with one name, a process would call the first in both kernels."""
    loops = activation._silu_row, activation._gelu_row, activation._gelu_tanh_row
    assert len({loop.py_func.__qualname__ for loop in loops}) == 3
    assert all("<locals>" not in loop.py_func.__qualname__ for loop in loops)


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        (swiglu, functional.silu),
        (gelu, functional.gelu),
        (gelu_tanh, lambda rows: functional.gelu(rows, approximate="tanh")),
    ],
    ids=["silu", "gelu", "tanh"],
)
@pytest.mark.parametrize(
    ("threads", "rows"), [(0, 7), pytest.param(2, 3000, marks=pytest.mark.slow)]
)
def test_activations_equal_the_modules(
    kernel: Any, function: Callable[[torch.Tensor], torch.Tensor], threads: int, rows: int
) -> None:
    """Far from zero they are the identity, or zero; the exponential neither overflows nor yields NaN."""
    gate, up = draw(rows, 37) * 4, draw(rows, 37, seed=1)
    gate[0, :6] = torch.tensor([0.0, -0.0, 300.0, -300.0, 17.0, -17.0])
    wanted = function(gate.float()).bfloat16() * up
    pool = pool_of(threads) if threads else 0
    kernel(pool, gate.data_ptr(), up.data_ptr(), rows, 37)
    clear = wanted.abs() > 1e-3  # torch subtracts two nearly equal numbers
    assert (gate == wanted)[clear].float().mean() > 0.95
    torch.testing.assert_close(gate, wanted, rtol=0.01, atol=1e-6)
