"""Choice of the faster operands on this processor: bfloat16 in pairs (VDPBF16PS), or float32.

Feature flags are not enough. One processor executes VDPBF16PS at twice the rate of float32; another has the
instruction but takes twice as long for it, so widening bfloat16 and multiplying float32 is faster by half. So both
are timed, for a few milliseconds. The choice is stored next to the compiled kernels: a restarted rank computes the
same results.
"""

from __future__ import annotations

import functools
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from vsched_workers.backends.cpu.kernel_store import kernel_folder, processor
from vsched_workers.backends.cpu.kernels.bf16 import BF16, FLOAT32
from vsched_workers.backends.cpu.kernels.gemm import PANEL, PASS_ROWS, repeat_pass
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
from vsched_workers.backends.reference.packed_weights import packs

FLOAT32_SHARE_MAX = 0.9
"""Maximum share of bfloat16's time at which float32 is chosen: its activations must be widened."""

_PAIRS, _REPEATS, _ROUNDS = 64, 300, 8


def supports_bf16() -> bool:
    """Return True if custom kernels can multiply bfloat16, which requires VDPBF16PS."""
    return has_bf16_dot()


def supports_attention() -> bool:
    """Return True if a custom kernel computes attention of many rows: with VDPBF16PS, or if oneDNN lacks bfloat16."""
    return supports_bf16() or not packs(torch.bfloat16)


@functools.cache
def operand() -> npt.NDArray[Any]:
    """Return the dtype tag, `BF16` or `FLOAT32`, of the faster operands on this processor."""
    if not supports_bf16():
        return FLOAT32
    file = choice_file()
    kept = "" if file is None else _read(file)
    if not kept:
        kept = "float32" if _float32_is_faster() else "bfloat16"
        if file is not None:
            kept = _keep(file, kept)
    return FLOAT32 if kept == "float32" else BF16


def choice_file() -> Path | None:
    """Return the file of the choice for this processor; None without a writable folder."""
    folder = kernel_folder()
    if folder is None or not os.access(folder, os.W_OK):
        return None
    return folder / f"operand-{processor()}"


def _read(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="ascii")
    return ""


def _keep(file: Path, choice: str) -> str:
    """Store a choice unless another process was first; return the stored one."""
    own = file.with_name(f"{file.name}-{os.getpid()}")
    with suppress(OSError):
        own.write_text(choice, encoding="ascii")
        with suppress(FileExistsError):
            file.hardlink_to(own)
        own.unlink()
    return _read(file) or choice


def _float32_is_faster() -> bool:
    bf16_s = float32_s = float("inf")
    for _ in range(_ROUNDS):
        bf16_s, float32_s = min(bf16_s, _seconds(BF16)), min(float32_s, _seconds(FLOAT32))
    return float32_s <= FLOAT32_SHARE_MAX * bf16_s


def _seconds(tag: npt.NDArray[Any]) -> float:
    """Seconds that one thread takes for products in the L1 cache."""
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
