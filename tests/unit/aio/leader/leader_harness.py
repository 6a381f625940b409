"""A leader with an in-memory link and a clock that tests advance."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import pytest

from vsched.aio.leader import Leader, ProcessLiveness
from vsched.config.sections import DeadlinesConfig
from vsched.kernel.decisions import GenerateDecision
from vsched.transport.zmq_link import pulse_identity, rank_identity
from vsched.wire import (
    Beat,
    EncodeResult,
    FollowerLog,
    GenerateResult,
    Hello,
    LogEntry,
    Pulse,
    RankReport,
    Ready,
    StepCheck,
    check_of,
    encode_report,
)

LIMITS = DeadlinesConfig(ready_s=60, step_s=30, heartbeat_s=4, rank_timeout_s=20)


class FakeLink:
    """An in-memory link: sent frames are kept, received ones are injected."""

    def __init__(self, on_frame: Callable[[bytes, bytes], None]) -> None:
        self.on_frame = on_frame
        self.sent: dict[int, list[bytes]] = {}
        self.backlogged: set[int] = set()
        self.unread: deque[tuple[int, RankReport]] = deque()
        self.closed = False

    def send(self, rank: int, frame: bytes) -> bool:
        if rank in self.backlogged:
            return False
        self.sent.setdefault(rank, []).append(frame)
        return True

    def carry(self, entry: LogEntry) -> None: ...

    def read(self) -> None:
        while self.unread:
            rank, report = self.unread.popleft()
            self.on_frame(rank_identity(rank), encode_report(report))

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeTimer:
    deadline_s: float
    call: Callable[[], object]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """A clock that tests advance, with its timers."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.create_future = asyncio.get_running_loop().create_future
        self.timers: list[FakeTimer] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> FakeTimer:
        self.timers.append(FakeTimer(self.now_s + delay_s, partial(call, *arguments)))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        """Advance the clock, firing due timers in order."""
        until_s = self.now_s + seconds
        while due := [t for t in self.timers if not t.cancelled and t.deadline_s <= until_s]:
            timer = min(due, key=lambda one: one.deadline_s)
            self.timers.remove(timer)
            self.now_s = max(timer.deadline_s, self.now_s)
            timer.call()
        self.now_s = until_s


def said(rank: int, step: int, token: bytes = b"\1\0\0\0") -> GenerateResult | StepCheck:
    """A rank's report on a step that produced this token."""
    result = GenerateResult(step, token, b"\0\0\0\0", [], [], 0)
    return StepCheck(step, check_of(result)) if rank else result


class LeaderHarness:
    """A leader with a fake link and a fake clock."""

    def __init__(
        self,
        ranks: int = 1,
        *,
        name: str = "generate",
        liveness: ProcessLiveness | None = None,
        loop: FakeLoop | None = None,
    ) -> None:
        self.results: list[GenerateResult | EncodeResult] = []
        self.lost: list[str] = []
        self.progress: list[tuple[str, float]] = []
        self.loop = loop or FakeLoop()
        self.ranks = range(ranks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "get_running_loop", lambda: self.loop)
            self.leader = Leader(
                name,
                self._open,
                secret="sesame",
                ranks=ranks,
                deadlines=LIMITS,
                on_result=lambda _group, result: self.results.append(result),
                on_lost=lambda failure: self.lost.append(str(failure)),
                on_progress=lambda what, fraction: self.progress.append((what, fraction)),
                liveness=liveness,
            )

    def _open(self, on_frame: Callable[[bytes, bytes], None]) -> FakeLink:
        self.link = FakeLink(on_frame)
        return self.link

    def receive(self, rank: int, report: RankReport) -> None:
        self.link.on_frame(rank_identity(rank), encode_report(report))

    def pulse(self, *ranks: int) -> None:
        for rank in ranks:
            for report in (Hello(rank, "sesame"), Pulse()):
                self.link.on_frame(pulse_identity(rank), encode_report(report))

    def enter(self, *ranks: int, hooks: dict[str, float] | None = None) -> Self:
        """Have these ranks, or all, be ready."""
        entering = ranks or self.ranks
        for rank in entering:
            self.receive(rank, Hello(rank, "sesame"))
        for rank in entering:
            self.receive(rank, Ready(10, {"kv": rank}, hooks or {}))
        return self

    def decide(self, *steps: int) -> None:
        for step in steps:
            self.leader.decide(GenerateDecision(step))

    def answer(self, step: int, *ranks: int) -> None:
        """Have these ranks, or all, report a step."""
        for rank in ranks or self.ranks:
            self.receive(rank, said(rank, step))

    def beat(self, seq: int) -> None:
        """Have all ranks answer the entry of this number."""
        for rank in self.ranks:
            self.receive(rank, Beat(seq, {}))

    def advance(self, seconds: float, *, pulses: Sequence[int] | None = None) -> None:
        """Advance the clock while these ranks, or all, send pulses."""
        until_s = self.loop.now_s + seconds
        while self.loop.now_s < until_s:
            self.pulse(*(self.ranks if pulses is None else pulses))
            self.loop.advance(min(1.0, until_s - self.loop.now_s))

    def turns(self, rank: int = 0) -> list[int]:
        """Turns of the steps that were sent to a rank."""
        log, turns = FollowerLog(), []
        for frame in self.link.sent.get(rank, []):
            log.accept(frame)
            turns.append(log.turn)
        return [turn for turn in turns if turn]

    def entries(self, rank: int = 0) -> list[LogEntry]:
        log = FollowerLog()
        return [log.accept(frame) for frame in self.link.sent.get(rank, [])]
