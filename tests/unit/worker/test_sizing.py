"""Orders for the KV cache, carried out on simulated memory."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.worker.device_fakes import KV_BYTES, LOAD, MIB, MeasuredGenerator, model_info
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.wire import SizeKv
from vsched.worker.sizing import KvBuilder

PROBE = SizeKv(4096, profile=True, headroom_bytes=0, probe=True)
BUILD = SizeKv(8192, profile=True, headroom_bytes=16 * MIB)


def sizing_on(
    kind: type[MeasuredGenerator] = MeasuredGenerator, *, state_bytes: int = 0
) -> tuple[KvBuilder, MeasuredGenerator]:
    worker = kind(SimulatedMemory(256 * MIB), state_bytes=LOAD.slots * state_bytes)
    info = msgspec.structs.replace(model_info(), state_bytes=state_bytes)
    return KvBuilder(worker, info, LOAD, rank=3), worker


def test_carry_out_measures_an_attempt() -> None:
    """Inputs of the next attempt: the peak of the profiling run, and the KV bytes as built."""
    sizing, worker = sizing_on()
    worker.row_bytes = MIB
    before = sizing.measure()
    sized = sizing.carry_out(PROBE)
    memory = sized.memory
    assert (sized.outcome, memory.rank, memory.kv_bytes) == ("fits", 3, 4096 * KV_BYTES)
    assert memory.weights_bytes == worker.weights_bytes
    grown = memory.peak_bytes - before.reserved_bytes
    assert grown == 4096 * KV_BYTES + LOAD.batch_tokens * worker.row_bytes
    assert memory.total_bytes == memory.available_bytes + memory.reserved_bytes
    assert sizing.blocks == 256


def test_carry_out_counts_the_states_of_all_slots() -> None:
    """They are allocated and freed with the KV cache, and are not part of its bytes."""
    sizing, worker = sizing_on(state_bytes=MIB)
    assert sizing.measure().state_bytes == 0
    memory = sizing.carry_out(PROBE).memory
    assert (memory.kv_bytes, memory.state_bytes) == (4096 * KV_BYTES, LOAD.slots * MIB)
    memory = sizing.carry_out(BUILD).memory
    assert memory.released_bytes == 4096 * KV_BYTES + LOAD.slots * MIB
    worker._kv.pop()  # the states, which are never dropped
    leaked = sizing.carry_out(PROBE)
    assert leaked.outcome == "leak"
    assert f"at least {8192 * KV_BYTES + LOAD.slots * MIB}" in leaked.message


def test_carry_out_tears_down_in_order() -> None:
    """Graphs, request state, KV and its backends, one release; then everything is built again."""
    sizing, worker = sizing_on()
    sizing.carry_out(PROBE)
    worker.events.clear()
    release = worker.memory.release

    def recorded() -> None:
        worker.events.append("release")
        release()

    worker.memory.release = recorded  # type: ignore[method-assign]
    sized = sizing.carry_out(BUILD)
    assert worker.events[:4] == ["drop graphs", "drop kv, 0 requests alive", "release", "build 512"]
    assert sized.memory.released_bytes == 4096 * KV_BYTES
    assert len(worker.batches) == 6, "the profiling run was repeated, with new state"


def test_carry_out_drops_what_a_failed_stress_left() -> None:
    """The error of a failing step must not keep its requests alive, nor the headroom."""
    sizing, worker = sizing_on()
    worker.memory.fail_at(4)
    assert sizing.carry_out(BUILD).outcome == "out_of_memory"
    worker.events.clear()
    sizing.carry_out(PROBE)
    assert "drop kv, 0 requests alive" in worker.events
    assert worker.memory.allocated() == worker.weights_bytes + 4096 * KV_BYTES


def test_carry_out_holds_the_headroom_during_the_profiling_run() -> None:
    """It is held while the steps run, and not after."""
    sizing, worker = sizing_on()
    assert sizing.carry_out(SizeKv(4096, profile=False, headroom_bytes=0)).outcome == "fits"
    assert not worker.batches, "nothing runs if no profile is requested"
    sizing.carry_out(SizeKv(4096, profile=True, headroom_bytes=0))
    plain = list(worker.held_bytes)
    worker.held_bytes.clear()
    sizing.carry_out(SizeKv(4096, profile=True, headroom_bytes=16 * MIB))
    assert [held - 16 * MIB for held in worker.held_bytes] == plain
    assert worker.memory.allocated() == worker.weights_bytes + 4096 * KV_BYTES


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_carry_out_reports_out_of_memory_at_every_allocation(number: int) -> None:
    """KV, headroom and each step: the error always leads to the same outcome, and a smaller order works after it."""
    sizing, worker = sizing_on()
    worker.memory.fail_at(number)
    sized = sizing.carry_out(BUILD)
    assert sized.outcome == "out_of_memory"
    assert "memory ran out on simulated" in sized.message
    assert "8192 tokens" in sized.message
    assert "Remedy" not in sized.message, "the policy has a better one"
    assert sized.memory.kv_bytes == (0 if number == 1 else 8192 * KV_BYTES)
    assert sizing.carry_out(PROBE).outcome == "fits"
    worker.memory.check_invariants()


def test_carry_out_takes_a_memory_error_for_what_it_is_and_lets_a_defect_pass() -> None:
    """Numpy and Python run out of memory, too; a smaller cache would not help against other errors."""
    sizing, worker = sizing_on()
    errors: list[Exception] = [MemoryError(), ValueError("shapes differ")]

    def step(_batch: object) -> None:
        raise errors.pop(0)

    worker.step = step  # type: ignore[method-assign, assignment]
    assert sizing.carry_out(PROBE).outcome == "out_of_memory"
    with pytest.raises(ValueError, match="shapes differ"):
        sizing.carry_out(PROBE)


@pytest.mark.parametrize("failed", [False, True])
def test_carry_out_calls_a_leak_a_leak(*, failed: bool) -> None:
    """Memory that does not come back is not out-of-memory, even after such a failure; nothing is built on top of it."""
    sizing, worker = sizing_on()
    if failed:
        worker.memory.fail_at(3)
    worker.leaks = True
    assert sizing.carry_out(PROBE).outcome == ("out_of_memory" if failed else "fits")
    sized = sizing.carry_out(BUILD)
    assert (sized.outcome, sized.memory.released_bytes) == ("leak", 0)
    assert f"value 0, limit at least {4096 * KV_BYTES}" in sized.message
    assert worker.events[-1].startswith("drop kv")


def test_carry_out_stresses_contexts_that_the_cache_can_hold() -> None:
    """A probe stands for caches of any size; in another cache a longer sequence is refused on arrival."""
    sizing, worker = sizing_on()
    sizing.carry_out(SizeKv(32, profile=True, headroom_bytes=0, probe=True))
    sizing.carry_out(SizeKv(32, profile=True, headroom_bytes=0))
    assert [context for _, context, *_ in worker.batches if context] == [126, 127, 30, 31]


class Sharing(MeasuredGenerator):
    """A worker of several ranks: records when it informs its peers of a failure."""

    def abort(self) -> None:
        self.events.append("abort")


def test_carry_out_reports_its_failure_to_peers() -> None:
    """A rank whose cache or headroom does not fit leaves no peer waiting in a step.

    When ranks disagreed, successful ones also meet their peers again before anything is built.
    """
    sizing, worker = sizing_on(Sharing)
    for order, outcome, aborts in (
        (SizeKv(4096, profile=True, headroom_bytes=0), "fits", 0),
        (SizeKv(4096, profile=True, headroom_bytes=0, renew=True), "fits", 1),
        (SizeKv(4096, profile=True, headroom_bytes=1 << 40), "out_of_memory", 1),
        (SizeKv(1 << 30, profile=True, headroom_bytes=0), "out_of_memory", 1),
    ):
        worker.events.clear()
        assert sizing.carry_out(order).outcome == outcome
        assert worker.events.count("abort") == aborts
        assert not order.renew or worker.events[0] == "abort"
