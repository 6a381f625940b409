"""The memory contract of a GPU, with a fake `torch.cuda`."""

from __future__ import annotations

import functools
import types

import pytest
import torch

from vsched.errors import DeviceOutOfMemory
from vsched_workers.backends.cuda.device import CudaMemory


class FakeCuda:
    """A fake `torch.cuda`."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def mem_get_info(self, _device: object) -> tuple[int, int]:
        return 600, 1000

    def memory_reserved(self, _device: object) -> int:
        return 300

    def memory_allocated(self, _device: object) -> int:
        return 200

    def max_memory_reserved(self, _device: object) -> int:
        return 350

    def reset_peak_memory_stats(self, _device: object) -> None:
        self.calls.append("reset")

    def synchronize(self, _device: object) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty")

    def get_device_properties(self, _device: object) -> object:
        return types.SimpleNamespace(uuid="1234-5678")


def test_cuda_memory_asks_allocator_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's cache is reserved, not available; the rest belongs to other processes. Not on a GPU."""
    cuda = FakeCuda()
    for name in dir(cuda):
        if not name.startswith("_") and name != "calls":
            monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    clear = functools.partial(cuda.calls.append, "workspaces")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    memory = CudaMemory("cuda:0")
    assert memory.pool == "cuda:GPU-1234-5678"
    assert (memory.total(), memory.available(), memory.reserved()) == (1000, 600, 300)
    assert (memory.allocated(), memory.peak()) == (200, 350)
    memory.reset_peak()
    memory.release()
    assert cuda.calls == ["reset", "synchronize", "workspaces", "empty"]


def test_cuda_memory_holds_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures on the device raise the common exception. Not on a GPU."""
    sizes: list[int] = []

    def empty(size: int, **_: object) -> object:
        sizes.append(size)
        if size > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return object()

    monkeypatch.setattr(torch, "empty", empty)
    memory = CudaMemory("cuda:0")
    with memory.hold(100):
        assert sizes == [100]
    with pytest.raises(DeviceOutOfMemory), memory.hold(101):
        pass
