"""The memory of a CUDA device: torch's caching allocator and the driver; tests replace `torch.cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vsched_workers.memory.out_of_memory import typed_out_of_memory


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._device = torch.device(name)

    @property
    def pool(self) -> str:
        return f"cuda:GPU-{torch.cuda.get_device_properties(self._device).uuid}"

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def available(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def drift(self, growth_bytes: int) -> int:
        return 0  # the allocator keeps its peak for this process

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        # cuBLAS takes workspaces of 32 MiB a stream from torch's allocator; captured graphs, which use theirs, are
        # dropped before.
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
        torch.cuda.empty_cache()

    def settle(self) -> None:
        """Keep the allocator's cache: another process could take freed memory."""

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Allocate `size` bytes; once freed, the allocator keeps them for this process until `release`."""
        with typed_out_of_memory("holding memory back"):
            held = torch.empty(size, dtype=torch.uint8, device=self._device)
        try:
            yield
        finally:
            del held
