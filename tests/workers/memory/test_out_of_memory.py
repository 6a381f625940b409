"""Conversion of out-of-memory errors to one exception."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vsched.errors import DeviceOutOfMemory
from vsched_workers.backends.reference.host_memory import HostMemory
from vsched_workers.memory.out_of_memory import require_available, typed_out_of_memory


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
    """All errors of allocators become one exception type."""
    with (
        pytest.raises(DeviceOutOfMemory, match="while testing. Remedy"),
        typed_out_of_memory("testing"),
    ):
        raise error


def test_typed_out_of_memory_comes_from_a_real_failure() -> None:
    """A real allocation failure, not a mock."""
    with pytest.raises(DeviceOutOfMemory), typed_out_of_memory("testing"):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(DeviceOutOfMemory), typed_out_of_memory("testing"):
        np.empty(1 << 60, dtype=np.uint8)


def test_typed_out_of_memory_lets_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"), typed_out_of_memory("testing"):
        raise RuntimeError("size mismatch")


def test_require_available_gives_value_limit_and_remedy() -> None:
    """The message has value, limit and remedy."""
    memory = HostMemory()
    require_available(memory, 1, "a byte")
    with pytest.raises(
        DeviceOutOfMemory, match=r"a lot does not fit on cpu.*value \d+, limit \d+\. Remedy"
    ):
        require_available(memory, 1 << 60, "a lot")


class CachingMemory(HostMemory):
    """Memory whose allocator caches all of it until `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.cached = 100

    def available(self) -> int:
        return 100 - self.cached

    def release(self) -> None:
        self.cached = 0


def test_require_available_counts_what_the_allocator_caches() -> None:
    memory = CachingMemory()
    require_available(memory, 100, "as much as is cached")
    with pytest.raises(DeviceOutOfMemory, match="value 101, limit 100"):
        require_available(CachingMemory(), 101, "more")


def test_require_available_keeps_the_cache_if_there_is_room_next_to_it() -> None:
    memory = CachingMemory()
    memory.cached = 40
    require_available(memory, 60, "what is free")
    assert memory.cached == 40
