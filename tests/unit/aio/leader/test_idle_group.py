"""An idle group of two ranks for hours of virtual time: the real leader, logs and followers over in-memory links."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vsched.aio.leader.leader import Deadlines, Leader
from vsched.config.sections import DeadlinesConfig
from vsched.sim.loop import VirtualLoop
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.symbolic_workers import StandInEncoder
from vsched.transport.zmq_link import pulse_identity, rank_identity
from vsched.wire import Hello, LogEntry, Pulse, Ready, encode_report
from vsched.worker.member import PULSES_PER_TIMEOUT, Member, RankHost
from vsched.worker.stage_rank import StageRank

IDLE_S = 2 * 3600.0
USUAL = DeadlinesConfig()
LIMITS = Deadlines(
    ready_s=USUAL.ready_s,
    step_s=USUAL.step_s,
    heartbeat_s=USUAL.heartbeat_s,
    rank_timeout_s=USUAL.rank_timeout_s,
)


class Wires:
    """Both ends of the links of one group."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.receive: Callable[[bytes, bytes], None] = lambda *_: None
        self.ranks: dict[int, RankBeside] = {}

    def lead(self, on_frame: Any) -> Wires:
        self.receive = on_frame
        return self

    def send(self, rank: int, frame: bytes) -> bool:
        self.loop.call_soon(self.ranks[rank].take, frame)
        return True

    def carry(self, entry: LogEntry) -> None: ...

    def read(self) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


class RankBeside:
    """An in-process rank: the real group member, a pulse, and the time of each log entry."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.received_s: list[float] = []
        self.inbox: deque[bytes] = deque()
        self._wires = wires
        self._rank = rank
        wires.ranks[rank] = self
        spec = SimpleNamespace(rank=rank, secret="sesame")
        host = RankHost(now_ns=lambda: int(wires.loop.time() * 1e9), memory=dict)
        self.member = Member(spec, Link(wires, rank), host)  # type: ignore[arg-type]
        self.member.stage = StageRank(StandInEncoder(SimulatedMemory(1)))
        self.member.report(Ready(10, {}))
        self._beat(encode_report(Hello(rank, "sesame")))

    def take(self, frame: bytes) -> None:
        self.received_s.append(self._wires.loop.time())
        self.inbox.append(frame)
        self.member.listen(0)
        assert self.member.carry_out()

    def _beat(self, frame: bytes) -> None:
        self._wires.receive(pulse_identity(self._rank), frame)
        every_s = LIMITS.rank_timeout_s / PULSES_PER_TIMEOUT
        self._wires.loop.call_later(every_s, self._beat, encode_report(Pulse()))


class Link:
    """A rank's end of the link."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self._wires = wires
        self._rank = rank

    def send(self, frame: bytes) -> None:
        self._wires.loop.call_soon(self._wires.receive, rank_identity(self._rank), frame)

    def receive(self, _timeout_s: float = 0.0) -> bytes:
        return self._wires.ranks[self._rank].inbox.popleft()

    def close(self) -> None:
        """No-op."""


@pytest.fixture
def wires() -> Iterator[Wires]:
    loop = VirtualLoop()
    yield Wires(loop)
    loop.close()


def test_idle_group_lives_for_hours(wires: Wires) -> None:
    """No request comes: no rank is declared dead, and no gap is longer than the interval."""
    lost: list[str] = []

    async def idle() -> None:
        leader = Leader(
            "generate",
            wires.lead,
            secret="sesame",
            ranks=2,
            deadlines=LIMITS,
            on_result=print,
            on_lost=lambda failure: lost.append(str(failure)),
            on_threads=print,
            on_progress=lambda *_: None,
        )
        ranks = [RankBeside(wires, rank) for rank in range(2)]
        await leader.ready
        await asyncio.sleep(IDLE_S)
        leader.close()
        for rank in ranks:
            gaps = [after - before for before, after in itertools.pairwise(rank.received_s)]
            assert len(gaps) >= IDLE_S / LIMITS.heartbeat_s - 2
            assert max(gaps) <= LIMITS.heartbeat_s
            assert rank.received_s[-1] > IDLE_S - 2 * LIMITS.heartbeat_s

    wires.loop.run_until_complete(idle())
    assert lost == []
