"""The real leader of a group over simulated links: an hour without faults, and detection times of each fault."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.unit.sim.virtual import current
from vsched.aio.leader import Leader
from vsched.config.sections import DeadlinesConfig
from vsched.errors import RankDesync
from vsched.failures import ErrorKind
from vsched.kernel.decisions import EncodeDecision
from vsched.sim.faults.injection import Injector
from vsched.sim.faults.plan import AnyFault, FaultPlan, MessageFault, MissedDecision, Partition
from vsched.sim.network.links import Network, RankEnd
from vsched.wire import (
    Beat,
    EncodeResult,
    FollowerLog,
    Heartbeat,
    Hello,
    Pulse,
    RankFailed,
    Ready,
    StepCheck,
    check_of,
    encode_report,
)

SECOND_NS = 10**9
ADDRESS = "ipc:///run/encode-0-1"
LIMITS = DeadlinesConfig(ready_s=10, step_s=20, heartbeat_s=1, rank_timeout_s=5)


class Group:
    """A leader and two ranks that reply at once, a step a second."""

    def __init__(self, *faults: AnyFault) -> None:
        injector = Injector(FaultPlan(faults=faults), current())
        self.network = Network(current(), random.Random(0), injector)
        self.lost: list[tuple[float, str]] = []
        self.results: list[int] = []
        self.leader = Leader(
            "encode-0",
            lambda on_frame: self.network.listen(ADDRESS, on_frame),
            secret="sesame",
            ranks=2,
            deadlines=LIMITS,
            on_result=lambda _group, result: self.results.append(result.step),
            on_lost=lambda failure: self.lost.append((current().time(), str(failure))),
            on_progress=lambda *_: None,
        )

    async def run(self, seconds: int) -> None:
        """Decide a step a second until the group is lost, for at most this time."""
        loop = current()
        ranks = [loop.create_task(self._follow(rank)) for rank in range(2)]
        await self.leader.ready
        for step in range(seconds):
            if not self.lost:
                self.leader.decide(EncodeDecision(step + 1, []))
            await asyncio.sleep(1)
        for rank in ranks:
            rank.cancel()
        self.leader.close()

    async def _follow(self, rank: int) -> None:
        end = self.network.connect(ADDRESS, rank)
        pulse = self.network.connect(end.address, rank, pulse=True)
        for one in (end, pulse):
            one.send(encode_report(Hello(rank, "sesame")))
        end.send(encode_report(Ready(0, {})))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat(pulse))
            tasks.create_task(self._answer(end, rank))

    async def _beat(self, pulse: RankEnd) -> None:
        while True:
            await asyncio.sleep(1)
            pulse.send(encode_report(Pulse()))

    async def _answer(self, end: RankEnd, rank: int) -> None:
        log = FollowerLog()
        while (frame := await end.next_frame()) is not None:
            try:
                entry = log.accept(frame)
            except RankDesync as error:
                end.send(encode_report(RankFailed(ErrorKind.DESYNC, "RankDesync", str(error))))
                return
            if isinstance(entry, Heartbeat):
                end.send(encode_report(Beat(log.seq, {})))
            elif isinstance(entry, EncodeDecision):
                result = EncodeResult(entry.step, None, 0)
                answer = StepCheck(entry.step, check_of(result)) if rank else result
                end.send(encode_report(answer))


@pytest.mark.slow
@pytest.mark.sim
async def test_group_lives_through_an_hour_without_faults() -> None:
    group = Group()
    await group.run(3600)
    assert group.lost == []
    assert group.results == list(range(1, 3601))


@pytest.mark.sim
async def test_missed_decision_is_noticed_with_the_next_entry() -> None:
    """The rank itself finds the gap, and computes nothing after it."""
    fault = MissedDecision(at_ns=30 * SECOND_NS, group="encode-0", rank=1)
    group = Group(fault)
    await group.run(60)
    ((at_s, reason),) = group.lost
    assert 30 < at_s < 30 + LIMITS.heartbeat_s
    assert "rank 1 stopped with RankDesync: heard entry" in reason


@pytest.mark.sim
@pytest.mark.parametrize("effect", ["corruption", "duplication"])
async def test_damaged_and_doubled_decisions_are_noticed_at_once(effect: Any) -> None:
    fault = MessageFault(
        at_ns=30 * SECOND_NS, duration_ns=SECOND_NS, group="encode-0", rank=1, effect=effect
    )
    group = Group(fault)
    await group.run(60)
    ((at_s, reason),) = group.lost
    assert 30 <= at_s < 31
    assert "RankDesync" in reason


@pytest.mark.sim
@pytest.mark.parametrize("frames", ["held", "lost"])
async def test_partition_is_noticed_in_bounded_time(frames: Any) -> None:
    fault = Partition(
        at_ns=30 * SECOND_NS, duration_ns=60 * SECOND_NS, group="encode-0", rank=1, frames=frames
    )
    group = Group(fault)
    await group.run(100)
    ((at_s, reason),) = group.lost
    assert 30 < at_s <= 30 + LIMITS.rank_timeout_s + 3 * LIMITS.heartbeat_s
    assert "rank 1 was silent" in reason


@pytest.mark.sim
async def test_short_partition_is_survived_when_frames_are_held() -> None:
    fault = Partition(at_ns=30 * SECOND_NS, duration_ns=3 * SECOND_NS, group="encode-0", rank=0)
    group = Group(fault)
    await group.run(60)
    assert group.lost == []
    assert group.results == list(range(1, 61))
