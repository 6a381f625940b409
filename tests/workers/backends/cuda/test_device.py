"""The memory contract of a GPU, with a fake `torch.cuda`."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from vsched.errors import DeviceOutOfMemory
from vsched_workers.backends.cuda.device import CudaMemory


def test_cuda_memory_asks_allocator_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's cache is reserved, not available; the rest belongs to other processes. Not on a GPU."""
    calls: list[str] = []
    answers = {
        "mem_get_info": (600, 1000),
        "memory_reserved": 300,
        "memory_allocated": 200,
        "max_memory_reserved": 350,
        "get_device_properties": SimpleNamespace(uuid="1234-5678"),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, answer=answer: answer)

    def noted(name: str, *_: object) -> None:
        calls.append(name)

    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, functools.partial(noted, name))
    clear = functools.partial(noted, "workspaces")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    memory = CudaMemory("cuda:0")
    assert memory.pool == "cuda:GPU-1234-5678"
    assert (memory.total(), memory.available(), memory.reserved()) == (1000, 600, 300)
    assert (memory.allocated(), memory.peak()) == (200, 350)
    memory.reset_peak()
    memory.release()
    assert calls == ["reset_peak_memory_stats", "synchronize", "workspaces", "empty_cache"]


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
