"""The operands that this processor multiplies fastest: bfloat16 in tiles (AMX) or pairs (VDPBF16PS), or float32.

Processors differ more than their features tell. One executes VDPBF16PS at twice the rate of float32; another has the
instruction and takes twice as long for it, so that widening bfloat16 and multiplying float32 is faster by half. So both
are timed once per process, for a few milliseconds.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy.typing as npt
import torch

from vsched_workers.backends.cpu.kernels.bf16 import BF16, FLOAT32
from vsched_workers.backends.cpu.kernels.gemm import PANEL, PASS_ROWS, repeat_pass
from vsched_workers.backends.cpu.kernels.simd import has_amx, has_bf16_dot

FLOAT32_SHARE_MAX = 0.9
"""float32 is chosen where it takes at most this share of the time: rows must be widened for it."""

_PAIRS, _REPEATS, _ROUNDS = 64, 300, 8


def pays_here() -> bool:
    """Return whether custom kernels multiply bfloat16: where there is VDPBF16PS, and no AMX, which oneDNN uses."""
    return has_bf16_dot() and not has_amx()


@functools.cache
def operand() -> npt.NDArray[Any]:
    """Return the dtype tag, `BF16` or `FLOAT32`, of what this processor multiplies faster."""
    bf16_s = float32_s = float("inf")
    for _ in range(_ROUNDS):
        bf16_s, float32_s = min(bf16_s, _seconds(BF16)), min(float32_s, _seconds(FLOAT32))
    return FLOAT32 if float32_s <= FLOAT32_SHARE_MAX * bf16_s else BF16


def _seconds(tag: npt.NDArray[Any]) -> float:
    """Return the seconds that one thread takes to multiply what lies in the first cache."""
    rows = torch.zeros(PASS_ROWS, 2 * _PAIRS * tag.itemsize, dtype=torch.uint8)
    panel, out = torch.zeros(_PAIRS, PANEL, 2).bfloat16(), torch.empty(PASS_ROWS, PANEL).bfloat16()
    start = time.perf_counter()
    repeat_pass(
        tag[0],
        _REPEATS,
        rows.data_ptr(),
        rows.stride(0),
        panel.data_ptr(),
        _PAIRS,
        out.data_ptr(),
        out.stride(0) * out.itemsize,
    )
    return time.perf_counter() - start
