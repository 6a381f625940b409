"""The memory contract on the CPU, and the one type of out-of-memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vsched.errors import DeviceOutOfMemory
from vsched_workers.device_memory import (
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
    ],
)
def test_typed_out_of_memory_is_one_type(error: Exception) -> None:
    """C16: whatever the allocator calls it, policies see one type."""
    with (
        pytest.raises(DeviceOutOfMemory, match="while testing. Remedy"),
        typed_out_of_memory("testing"),
    ):
        raise error


def test_typed_out_of_memory_comes_from_a_real_failure() -> None:
    """C16: a true allocation failure, not a mock."""
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
    before = memory.reserved()
    held = np.ones(64 << 20, dtype=np.uint8)
    assert memory.reserved() - before > 48 << 20
    del held
    memory.release()
    assert memory.reserved() - before < 32 << 20
    assert memory.peak() - before > 48 << 20
    assert 0 < memory.available() <= memory.total()


def test_require_available_gives_value_limit_and_remedy() -> None:
    """C5's wording rule."""
    memory = open_device_memory("cpu")
    require_available(memory, 1, "a byte")
    with pytest.raises(
        DeviceOutOfMemory, match=r"a lot does not fit on cpu.*value \d+, limit \d+\. Remedy"
    ):
        require_available(memory, 1 << 60, "a lot")
