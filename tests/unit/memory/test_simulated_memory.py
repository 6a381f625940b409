"""The simulated allocator: rounding, segments, cache, fragmentation, peers, and failures on demand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.properties import REPEATABLE
from vsched.errors import DeviceOutOfMemory
from vsched.sim.ranks.device_memory import SimulatedMemory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 20 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_simulated_memory_rounds_up(size: int, allocated: int, reserved: int) -> None:
    memory = SimulatedMemory(64 * MIB)
    memory.allocate(size)
    assert (memory.allocated(), memory.reserved()) == (allocated, reserved)


def test_simulated_memory_fragments() -> None:
    """Two free pieces of two segments make no large one, and one small tenant keeps a whole segment."""
    memory = SimulatedMemory(48 * MIB)
    handles = [memory.allocate(5 * MIB) for _ in range(8)]
    for handle in handles[1:4] + handles[5:]:
        memory.free(handle)
    assert memory.reserved() - memory.allocated() == 30 * MIB
    with pytest.raises(DeviceOutOfMemory, match=r"value 16777216 bytes, limit 8388608 bytes free"):
        memory.allocate(16 * MIB)
    memory.allocate(15 * MIB)
    memory.release()
    assert memory.reserved() == 40 * MIB


def test_simulated_memory_gives_its_cache_back_before_it_fails() -> None:
    memory = SimulatedMemory(64 * MIB)
    memory.free(memory.allocate(30 * MIB))
    memory.free(memory.allocate(34 * MIB))
    memory.allocate(60 * MIB)
    assert memory.reserved() == 60 * MIB
    assert memory.peak() == 64 * MIB


def test_simulated_memory_fails_on_demand() -> None:
    """The error comes from the named allocation and from no other."""
    memory = SimulatedMemory(64 * MIB)
    memory.allocate(1)
    memory.fail_at(2)
    memory.allocate(1)
    with pytest.raises(DeviceOutOfMemory, match="injected"):
        memory.allocate(1)
    memory.allocate(1)
    assert memory.allocations == 4
    assert memory.allocated() == 3 * 512


@REPEATABLE
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("allocate"), st.integers(1, 24 * MIB)),
            st.tuples(st.just("free"), st.integers(0, 99)),
            st.tuples(st.just("release"), st.just(0)),
            st.tuples(st.just("peers"), st.integers(0, 16 * MIB)),
        ),
        max_size=40,
    )
)
def test_simulated_memory_keeps_its_books(actions: list[tuple[str, int]]) -> None:
    """After any actions nothing overlaps or is lost, and allocations never exceed the device."""

    def run() -> list[tuple[int, int, int]]:
        memory = SimulatedMemory(96 * MIB)
        handles: list[int] = []
        seen = []
        for action, number in actions:
            if action == "allocate":
                before_bytes = memory.allocated()
                try:
                    handles.append(memory.allocate(number))
                except DeviceOutOfMemory:
                    assert memory.allocated() == before_bytes
                else:
                    assert number <= memory.allocated() - before_bytes < number + 512
            elif action == "free" and handles:
                memory.free(handles.pop(number % len(handles)))
            elif action == "release":
                memory.release()
            elif action == "peers":
                memory.set_peers_bytes(min(number, memory.available()))
            memory.check_invariants()
            assert memory.reserved() <= memory.total()
            seen.append((memory.allocated(), memory.reserved(), memory.peak()))
        for handle in handles:
            memory.free(handle)
        memory.release()
        assert memory.reserved() == 0, "freed memory is merged again"
        return seen

    assert run() == run()
