from __future__ import annotations

import asyncio
import sys
from types import FrameType
from typing import Any

import pytest

from tests.unit.sim.virtual import current
from vsched import faultpoints
from vsched.errors import DeviceOutOfMemory
from vsched.faultpoints import armed, fault_point
from vsched.sim.faults import (
    AnyFault,
    DecodeError,
    FaultPlan,
    Hang,
    Injector,
    OutOfMemory,
    Slowdown,
    TiePermutation,
    WorkerCrash,
)


def make_injector(*faults: AnyFault) -> Injector:
    return Injector(FaultPlan(faults=faults), current())


def test_fault_point_does_next_to_nothing_while_nothing_is_armed() -> None:
    """Counted, not timed: a lookup of one name, a comparison, a return; and no call."""
    steps: list[str] = []

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        frame.f_trace_opcodes = True
        steps.append(event)
        return trace

    sys.settrace(trace)
    try:
        fault_point("media.decode")
    finally:
        sys.settrace(None)
    assert steps.count("call") == 1
    assert steps.count("opcode") <= 7


def test_fault_point_calls_whoever_is_armed_and_raises_what_it_raises() -> None:
    visits: list[tuple[str, str]] = []

    def refuse(name: str, subject: str) -> None:
        raise ValueError(f"{name} {subject}")

    with armed(lambda *session: visits.append(session)):
        fault_point("media.decode")
        with armed(refuse), pytest.raises(ValueError, match="rank.step generate-0"):
            fault_point("rank.step", "generate-0")
        fault_point("rank.step", "generate-1")
    fault_point("media.decode")
    assert visits == [("media.decode", ""), ("rank.step", "generate-1")]
    assert faultpoints._on_point is None


@pytest.mark.sim
async def test_injector_hands_a_fault_out_once_when_it_is_due_to_its_target() -> None:
    crash = WorkerCrash(at_ns=10**9, group="generate-0", rank=1)
    injector = make_injector(crash)
    assert injector.take(WorkerCrash, group="generate-0", rank=1) is None, "not yet"
    await asyncio.sleep(1)
    assert injector.take(WorkerCrash, group="generate-1", rank=1) is None
    assert injector.take(WorkerCrash, group="generate-0", rank=0) is None
    assert injector.take(Hang, group="generate-0", rank=1) is None
    assert injector.take(WorkerCrash, group="generate-0", such=lambda one: one.rank == 0) is None
    await asyncio.sleep(1)
    assert injector.take(WorkerCrash, group="generate-0", rank=1) == crash
    assert injector.take(WorkerCrash, group="generate-0", rank=1) is None
    assert [(one.now_ns, one.fault) for one in injector.struck] == [(2 * 10**9, crash)]


@pytest.mark.sim
async def test_injector_hands_out_the_earliest_first() -> None:
    later, sooner = DecodeError(at_ns=2), DecodeError(at_ns=1)
    injector = make_injector(later, sooner)
    await asyncio.sleep(1)
    assert injector.take(DecodeError) == sooner
    assert injector.take(DecodeError) == later


@pytest.mark.sim
async def test_injector_shows_what_lasts_while_it_lasts() -> None:
    slow = Slowdown(at_ns=10**9, duration_ns=10**9, group="generate-0")
    injector = make_injector(slow)
    seen = []
    for _ in range(4):
        seen.append(injector.active(Slowdown, group="generate-0", rank=0))
        await asyncio.sleep(0.75)
    assert seen == [[], [], [slow], []]
    assert len(injector.struck) == 1


@pytest.mark.sim
async def test_injector_raises_at_fault_points() -> None:
    injector = make_injector(OutOfMemory(at_ns=10**9, group="generate-0"), DecodeError())
    injector.raise_at("rank.step", OutOfMemory, lambda fault: DeviceOutOfMemory(fault.group))
    with injector.armed():
        fault_point("rank.step", "generate-0")
        fault_point("somewhere.else")
        await asyncio.sleep(1)
        fault_point("rank.step", "generate-1")
        with pytest.raises(DeviceOutOfMemory, match="generate-0"):
            fault_point("rank.step", "generate-0")
        fault_point("rank.step", "generate-0")
    fault_point("rank.step", "generate-0")


@pytest.mark.sim
async def test_injector_permutes_ties_from_a_time_on() -> None:
    make_injector(TiePermutation(at_ns=10**9, seed=5))

    async def race() -> list[int]:
        order: list[int] = []

        async def run(index: int) -> None:
            await asyncio.sleep(1)
            order.append(index)

        await asyncio.gather(*(run(index) for index in range(8)))
        return order

    await asyncio.sleep(0.5)
    assert await race() == list(range(8)) or current().time() > 1
    permuted = await race()
    assert permuted != list(range(8))
    assert current().statistics().permutations > 0
