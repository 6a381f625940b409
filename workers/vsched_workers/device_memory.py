"""One contract for the memory of a device, whatever the device.

Nothing above this file knows an allocator: out-of-memory of every kind becomes `DeviceOutOfMemory` here, and sizes are
asked for here.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from vsched.errors import DeviceOutOfMemory, limit_message

_PROCESS_STATUS = Path("/proc/self/status")
_HOST_MEMORY = Path("/proc/meminfo")
_PEAK_RESET = Path("/proc/self/clear_refs")
_GROUP_MEMORY = Path("/sys/fs/cgroup")


class DeviceMemory(Protocol):
    """The memory of one device; every method returns bytes."""

    name: str

    def total(self) -> int:
        """Return what this process could use at most, were it alone."""
        ...

    def available(self) -> int:
        """Return what can still be allocated now."""
        ...

    def reserved(self) -> int:
        """Return what this process holds, its allocator's caches included."""
        ...

    def peak(self) -> int:
        """Return the highest `reserved` since the last reset."""
        ...

    def reset_peak(self) -> None:
        """Start a new measurement of the peak."""
        ...

    def release(self) -> None:
        """Give back what the allocator caches."""
        ...


def open_device_memory(device: str) -> DeviceMemory:
    """Return the memory of a device named as torch names it."""
    return CudaMemory(device) if device.startswith("cuda") else HostMemory(device)


@contextmanager
def typed_out_of_memory(doing: str) -> Iterator[None]:
    """Turn every kind of out-of-memory into the one error that the rest of the system knows."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory(_message(doing)) from error
    except MemoryError as error:
        raise DeviceOutOfMemory(_message(doing)) from error
    except RuntimeError as error:
        # The CPU allocator of torch has no type of its own for this.
        if "not enough memory" in str(error) or "can't allocate memory" in str(error):
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
    """The memory of a CPU worker: the smallest of the process limit, the control group and the host."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    def total(self) -> int:
        bounds = [_kib(_HOST_MEMORY, "MemTotal")]
        bounds.extend(bound for bound in (_data_limit(), _group_limit()) if bound is not None)
        return min(bounds)

    def available(self) -> int:
        bounds = [_kib(_HOST_MEMORY, "MemAvailable")]
        limit = _data_limit()
        if limit is not None:
            bounds.append(limit - _kib(_PROCESS_STATUS, "VmData"))
        group, used = _group_limit(), _group_used()
        if group is not None and used is not None:
            bounds.append(group - used)
        return max(0, min(bounds))

    def reserved(self) -> int:
        return _kib(_PROCESS_STATUS, "VmRSS")

    def peak(self) -> int:
        return _kib(_PROCESS_STATUS, "VmHWM")

    def reset_peak(self) -> None:
        # 5 resets the high-water mark. Where the kernel does not allow it the old peak stays, which errs on the safe
        # side.
        try:
            _PEAK_RESET.write_text("5")
        except OSError:
            return

    def release(self) -> None:
        """Return free heap pages to the host, where the C library can."""
        import ctypes

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class CudaMemory:
    """The memory of a CUDA device, by torch's caching allocator. Not yet run on a GPU."""

    def __init__(self, name: str) -> None:
        import torch

        self.name = name
        self._device = torch.device(name)

    def total(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(self._device)[1])

    def available(self) -> int:
        import torch

        free = int(torch.cuda.mem_get_info(self._device)[0])
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return free + int(cached)

    def reserved(self) -> int:
        import torch

        return int(torch.cuda.memory_reserved(self._device))

    def peak(self) -> int:
        import torch

        return int(torch.cuda.max_memory_reserved(self._device))

    def reset_peak(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        import torch

        torch.cuda.empty_cache()


def _kib(path: Path, field: str) -> int:
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _data_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft


def _group_value(*names: str) -> int | None:
    for name in names:
        try:
            text = (_GROUP_MEMORY / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _group_limit() -> int | None:
    return _group_value("memory.max", "memory/memory.limit_in_bytes")


def _group_used() -> int | None:
    return _group_value("memory.current", "memory/memory.usage_in_bytes")
