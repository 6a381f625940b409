"""The memory of the devices that torch computes on, behind one contract.

Nothing above this file knows an allocator: out-of-memory of every kind becomes `DeviceOutOfMemory` here, and sizes are
asked for here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from vsched.errors import DeviceOutOfMemory, limit_message
from vsched.worker.memory import (
    DeviceMemory,
    host_available,
    host_total,
    process_limit,
    status_bytes,
)

_PEAK_RESET = Path("/proc/self/clear_refs")

_OUT_OF_MEMORY = re.compile(
    "not enough memory|can't allocate memory|cannot allocate memory|out of memory|bad_alloc|bad allocation"
    "|could not create a (memory|primitive|scratchpad)|could not (execute|run) a primitive",
    re.IGNORECASE,
)
"""How errors without a type of their own say it: torch's CPU allocator, oneDNN, the C++ library."""


def open_device_memory(device: str) -> DeviceMemory:
    """Return the memory of a device named as torch names it."""
    return CudaMemory(device) if device.startswith("cuda") else HostMemory(device)


@contextmanager
def typed_out_of_memory(doing: str) -> Iterator[None]:
    """Turn every kind of out-of-memory into the one error that the rest of the system knows."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceOutOfMemory(_message(doing)) from error
    except (RuntimeError, OSError) as error:
        if _OUT_OF_MEMORY.search(str(error)):
            raise DeviceOutOfMemory(_message(doing)) from error
        raise


def _message(doing: str) -> str:
    return (
        f"memory ran out while {doing}. Remedy: make the KV cache smaller (generate.memory), or lower the token "
        "budgets of a step (encode.admission.max_tokens, generate.max_batch_tokens)."
    )


def require_available(memory: DeviceMemory, size: int, what: str) -> None:
    """Check that something will fit before it is allocated.

    A host hands out more memory than it has and kills somebody later; so the failure is made here, where it has a name.

    Raises:
        DeviceOutOfMemory: When it does not fit.
    """
    available = memory.available()
    if size > available:
        raise DeviceOutOfMemory(
            limit_message(
                f"{what} does not fit on {memory.name} (bytes)",
                value=size,
                limit=available,
                remedy="make it smaller (generate.memory), or free memory on the device",
            )
        )


class HostMemory:
    """The memory of a CPU worker, counted as what bounds it counts.

    Under a limit on the process, that is its private writable mappings, touched or not (`VmData`). The kernel keeps no
    peak of these, but one of all address space (`VmPeak`), which cannot be reset; yet a mapping without access counts
    to it and not to the limit. `reset_peak` maps as much as lifts the address space to its old peak: whatever is mapped
    from then on is a new one. Address space that is not private memory (files, code) may have grown in between without
    being there at the peak; it is added, which errs on the safe side.

    Without a limit the host's or the control group's memory is the bound, and what counts is what is resident.
    """

    def __init__(self, name: str = "cpu") -> None:
        self.name = name
        self._ballast: mmap.mmap | None = None
        self._other_bytes = 0

    @property
    def pool(self) -> str:
        return "cpu" if self._limit() is None else f"cpu limit of {os.getpid()}"

    def total(self) -> int:
        host = host_total()
        limit = process_limit()
        return host if limit is None else min(limit, host)

    def available(self) -> int:
        host, limit = host_available(), process_limit()
        return host if limit is None else max(0, min(host, limit - status_bytes("VmData")))

    def reserved(self) -> int:
        return status_bytes("RssAnon" if self._limit() is None else "VmData")

    def allocated(self) -> int:
        # The C library cannot tell what of its heap is in use; so what is not goes back first.
        self.release()
        return self.reserved()

    def peak(self) -> int:
        if self._limit() is None:
            gone = status_bytes("VmHWM") - status_bytes("VmRSS")
            counted, other = status_bytes("RssAnon"), _resident_files()
        else:
            gone = status_bytes("VmPeak") - status_bytes("VmSize")
            counted, other = status_bytes("VmData"), _unlimited_space()
        return counted + max(0, gone) + max(0, other - self._other_bytes)

    def reset_peak(self) -> None:
        if self._limit() is None:
            # 5 resets the high-water mark. Where the kernel does not allow it the old peak stays, which errs on the
            # safe side.
            with suppress(OSError):
                _PEAK_RESET.write_text("5", encoding="ascii")
            self._other_bytes = _resident_files()
            return
        if self._ballast is not None:
            self._ballast.close()
            self._ballast = None
        gap = status_bytes("VmPeak") - status_bytes("VmSize")
        if gap > 0:
            self._ballast = map_private(gap, access=0)
        self._other_bytes = _unlimited_space()

    def release(self) -> None:
        """Return free heap pages to the host, where the C library can."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Map so many bytes and touch each page of them."""
        if not size:
            yield
            return
        require_available(self, size, "memory to hold back")
        with typed_out_of_memory("holding memory back"):
            held = map_private(size, access=mmap.PROT_READ | mmap.PROT_WRITE)
        with held:
            np.frombuffer(held, dtype=np.uint8)[:: mmap.PAGESIZE] = 1
            yield

    def _limit(self) -> int | None:
        """Return the process limit where it is what binds."""
        limit = process_limit()
        return limit if limit is not None and limit <= host_total() else None


class CudaMemory:
    """The memory of a CUDA device: torch's caching allocator and the driver. Not yet run on a GPU."""

    def __init__(self, name: str) -> None:
        import torch

        self.name = name
        self._device = torch.device(name)

    @property
    def pool(self) -> str:
        import torch

        return f"cuda:GPU-{torch.cuda.get_device_properties(self._device).uuid}"

    def total(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(self._device)[1])

    def available(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(self._device)[0])

    def reserved(self) -> int:
        import torch

        return int(torch.cuda.memory_reserved(self._device))

    def allocated(self) -> int:
        import torch

        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        import torch

        return int(torch.cuda.max_memory_reserved(self._device))

    def reset_peak(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Allocate so many bytes; once freed, the allocator keeps them for this process until `release`."""
        import torch

        with typed_out_of_memory("holding memory back"):
            held = torch.empty(size, dtype=torch.uint8, device=self._device)
        try:
            yield
        finally:
            del held


def map_private(size: int, *, access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """Return a mapping of its own, which goes back to the host as soon as nobody refers to it."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=access)


def _resident_files() -> int:
    return status_bytes("RssFile") + status_bytes("RssShmem")


def _unlimited_space() -> int:
    """Return the address space that the limit does not count."""
    return status_bytes("VmSize") - status_bytes("VmData")
