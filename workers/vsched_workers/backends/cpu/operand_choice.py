"""With what this processor multiplies bfloat16 fastest: tiles, pairs, or float32.

Processors differ more than they tell. One multiplies pairs of bfloat16 at twice the rate of float32; another has the
instruction and takes twice as long for it, so that widening bfloat16 and multiplying float32 is faster by half, and
nothing in its features says so. So both are timed once a process, for a few milliseconds.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy.typing as npt
import torch

from vsched_workers.backends.cpu.kernels import rates as rate_kernels
from vsched_workers.backends.cpu.kernels.gemm import PANEL, PASS_ROWS
from vsched_workers.backends.cpu.kernels.vectors import PAIR, SINGLE, can_multiply, multiplies_tiles

SINGLE_SHARE_MAX = 0.9
"""float32 is chosen where it takes at most this share of the time: rows must be widened for it."""

_PAIRS, _TURNS, _ROUNDS = 64, 300, 8


def pays_here() -> bool:
    """Return whether kernels of our own multiply bfloat16: not where oneDNN has tiles, or there are no pairs."""
    return can_multiply() and not multiplies_tiles()


@functools.cache
def operand() -> npt.NDArray[Any]:
    """Return `PAIR` or `SINGLE`, whichever this processor multiplies faster."""
    pairs = singles = float("inf")
    for _ in range(_ROUNDS):
        pairs, singles = min(pairs, _seconds(PAIR)), min(singles, _seconds(SINGLE))
    return SINGLE if singles <= SINGLE_SHARE_MAX * pairs else PAIR


def _seconds(kind: npt.NDArray[Any]) -> float:
    """Return what one thread takes to multiply what lies in the first cache."""
    rows = torch.zeros(PASS_ROWS, 2 * _PAIRS * kind.itemsize, dtype=torch.uint8)
    panel, out = torch.zeros(_PAIRS, PANEL, 2).bfloat16(), torch.empty(PASS_ROWS, PANEL).bfloat16()
    start = time.perf_counter()
    rate_kernels.multiply_again(
        kind[0],
        _TURNS,
        rows.data_ptr(),
        rows.stride(0),
        panel.data_ptr(),
        _PAIRS,
        out.data_ptr(),
        out.stride(0) * out.itemsize,
    )
    return time.perf_counter() - start
