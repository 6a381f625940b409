"""The CUDA backend on a CPU: its code for models, with the host's memory, copies and collectives.

Triton's kernels run in its interpreter if `TRITON_INTERPRET` is set; otherwise transformers' modules run. Decode steps
are not captured (`test_graphs.py` tests that).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vsched.worker.contract import WorkerSettings
from vsched_workers import language, vision
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cuda.attention_trials import try_kernels
from vsched_workers.backends.cuda.backend import CudaBackend
from vsched_workers.backends.cuda.device import parts_off
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.paged_attention import AttentionKernels


class CudaOnHost(CudaBackend):
    """The backend for device `cpu`."""

    def __init__(
        self, settings: WorkerSettings, dtype: torch.dtype, kv_dtype: str = "auto"
    ) -> None:
        del kv_dtype
        Backend.__init__(self, settings, dtype)
        self._off, self._captures, self._quantizer = parts_off(), False, None
        self.spare_blocks = 0

    def load_attention(self) -> None:
        """Do nothing: kernels are chosen with the cache."""

    def choose_attention(
        self, cache: KvCache, heads: int, *, ruled: bool = False
    ) -> AttentionKernels:
        return try_kernels(self.settings, self.dtype, cache, heads, ruled=ruled)

    def fetch_rows(
        self, source: npt.NDArray[np.uint8], wanted: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        return torch.from_numpy(source[wanted])

    def send_pixels(self, parts: Sequence[npt.NDArray[np.uint8]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts))


def install() -> None:
    """Have language and vision workers of this process take this backend."""
    workers: list[Any] = [language, vision]
    for module in workers:
        module.choose_backend = CudaOnHost


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels of Triton run: on the device, or in the interpreter."""


def backend_here(**given: Any) -> Any:
    """Return the CUDA backend on this machine's device, or on the host."""
    backend: Any = choose_backend(WorkerSettings(device="cuda", **given), torch.float32)
    backend.device = DEVICE
    if backend._quantizer is not None:
        backend._quantizer._device = DEVICE
    return backend
