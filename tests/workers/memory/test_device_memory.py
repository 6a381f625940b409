"""The memory contract on the CPU, and the one type of out-of-memory."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from tests.patience import PATIENCE_S
from vsched.errors import DeviceOutOfMemory
from vsched_workers.memory.device_memory import (
    open_device_memory,
    require_available,
    typed_out_of_memory,
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError("numpy"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError(
            "unable to mmap 9 bytes from file <model.safetensors>: Cannot allocate memory"
        ),
        RuntimeError("could not create a primitive"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_typed_out_of_memory_is_one_type(error: Exception) -> None:
    """Whatever the allocator calls it, policies see one type."""
    with (
        pytest.raises(DeviceOutOfMemory, match="while testing. Remedy"),
        typed_out_of_memory("testing"),
    ):
        raise error


def test_typed_out_of_memory_comes_from_a_real_failure() -> None:
    """A true allocation failure, not a mock."""
    with pytest.raises(DeviceOutOfMemory), typed_out_of_memory("testing"):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(DeviceOutOfMemory), typed_out_of_memory("testing"):
        np.empty(1 << 60, dtype=np.uint8)


def test_typed_out_of_memory_lets_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"), typed_out_of_memory("testing"):
        raise RuntimeError("size mismatch")


def test_host_memory_sees_an_allocation_and_its_peak() -> None:
    memory = open_device_memory("cpu")
    memory.release()
    memory.reset_peak()
    before = memory.allocated()
    held = np.ones(64 << 20, dtype=np.uint8)
    assert memory.reserved() - before > 48 << 20
    del held
    assert memory.allocated() - before < 32 << 20
    assert memory.peak() - before > 48 << 20
    assert 0 < memory.available() <= memory.total()
    assert memory.pool == "cpu"


def test_host_memory_holds_for_real() -> None:
    """Pages are touched, so that the host has given them."""
    memory = open_device_memory("cpu")
    before = memory.allocated()
    with memory.hold(64 << 20):
        assert memory.reserved() - before > 60 << 20
    assert memory.allocated() - before < 8 << 20
    with memory.hold(0):
        pass


UNDER_A_LIMIT = """
from vsched.worker.memory import limit_process_memory
limit_process_memory(900 << 20)
import numpy as np
import torch
from vsched.errors import DeviceOutOfMemory
from vsched_workers.memory.device_memory import open_device_memory, typed_out_of_memory
MIB = 1 << 20
memory = open_device_memory("cpu")
assert memory.pool.startswith("cpu limit of ")
assert memory.total() == 900 * MIB
assert memory.available() == memory.total() - memory.reserved(), "peers are nobody"
old = torch.ones(200 * MIB, dtype=torch.uint8)
del old
memory.reset_peak()
before = memory.reserved()
assert memory.peak() - before < MIB, "an older peak is forgotten"
held = torch.ones(50 * MIB, dtype=torch.uint8)
untouched = np.zeros(30 * MIB, np.uint8)
assert 80 * MIB <= memory.reserved() - before < 81 * MIB, "the limit counts what nobody touched"
del held, untouched
assert memory.reserved() - before < MIB, "freed memory stops counting"
assert 80 * MIB <= memory.peak() - before < 81 * MIB
with memory.hold(300 * MIB):
    assert memory.reserved() - before >= 300 * MIB
try:
    with memory.hold(900 * MIB):
        pass
except DeviceOutOfMemory:
    print("refused")
for allocate in (
    lambda: torch.empty(900 * MIB, dtype=torch.uint8),
    lambda: np.empty(900 * MIB, np.uint8),
    lambda: bytearray(900 * MIB),
):
    try:
        with typed_out_of_memory("testing"):
            allocate()
    except DeviceOutOfMemory:
        print("typed")
"""


@pytest.mark.slow
def test_host_memory_counts_what_the_limit_counts() -> None:
    """Total, available, reserved and peak add up under a real limit, and failures have the one type."""
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert not done.returncode, done.stderr
    assert done.stdout.split() == ["refused", "typed", "typed", "typed"]


class FakeCuda:
    """What `torch.cuda` would say."""

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
    """What the allocator caches is reserved, not available; the rest of what is gone are peers. Not on a GPU."""
    cuda = FakeCuda()
    for name in dir(cuda):
        if not name.startswith("_") and name != "calls":
            monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    memory = open_device_memory("cuda:0")
    assert memory.pool == "cuda:GPU-1234-5678"
    assert (memory.total(), memory.available(), memory.reserved()) == (1000, 600, 300)
    assert (memory.allocated(), memory.peak()) == (200, 350)
    memory.reset_peak()
    memory.release()
    assert cuda.calls == ["reset", "synchronize", "empty"]


def test_cuda_memory_holds_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the device refuses has the one type. Not on a GPU."""
    sizes: list[int] = []

    def empty(size: int, **_: object) -> object:
        sizes.append(size)
        if size > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return object()

    monkeypatch.setattr(torch, "empty", empty)
    memory = open_device_memory("cuda:0")
    with memory.hold(100):
        assert sizes == [100]
    with pytest.raises(DeviceOutOfMemory), memory.hold(101):
        pass


def test_require_available_gives_value_limit_and_remedy() -> None:
    """C5's wording rule."""
    memory = open_device_memory("cpu")
    require_available(memory, 1, "a byte")
    with pytest.raises(
        DeviceOutOfMemory, match=r"a lot does not fit on cpu.*value \d+, limit \d+\. Remedy"
    ):
        require_available(memory, 1 << 60, "a lot")
