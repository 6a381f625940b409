"""A leader whose link has no wire and whose clock moves when it is told."""

from __future__ import annotations

import asyncio

import pytest

from vsched.aio import leader as leader_module
from vsched.aio.leader import Deadlines, Leader
from vsched.transport.zmq_link import rank_identity
from vsched.wire import (
    EncodeResult,
    Entry,
    FollowerLog,
    GenerateResult,
    Hello,
    Ready,
    Report,
    encode_report,
)

LIMITS = Deadlines(ready_s=60, step_s=30, heartbeat_s=4, rank_timeout_s=20)


class FakeLink:
    """A link without a wire: what is sent is kept, what comes is handed in."""

    made: FakeLink

    def __init__(self, context: object, address: str, on_frame: object) -> None:
        FakeLink.made = self
        self.on_frame = on_frame
        self.sent: dict[int, list[list[bytes]]] = {}
        self.deaf: set[int] = set()
        self.closed = False

    def send(self, rank: int, frames: list[bytes]) -> bool:
        if rank in self.deaf:
            return False
        self.sent.setdefault(rank, []).append(frames)
        return True

    def close(self) -> None:
        self.closed = True


class FakeTimer:
    def __init__(self, deadline_s: float, call: object) -> None:
        self.deadline_s = deadline_s
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """A clock that moves when it is told, and the timers that are set on it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._real = asyncio.get_running_loop()
        self.timers: list[FakeTimer] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: object) -> FakeTimer:
        self.timers.append(FakeTimer(self.now_s + delay_s, call))
        return self.timers[-1]

    def create_future(self) -> asyncio.Future[list[Ready]]:
        return self._real.create_future()

    def advance(self, seconds: float) -> None:
        """Let time pass, and fire what is due, in order."""
        until_s = self.now_s + seconds
        while due := [t for t in self.timers if not t.cancelled and t.deadline_s <= until_s]:
            timer = min(due, key=lambda one: one.deadline_s)
            self.timers.remove(timer)
            self.now_s = timer.deadline_s
            timer.call()  # type: ignore[operator]
        self.now_s = until_s


class Led:
    """A leader with a fake link and a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ranks: int, limits: Deadlines) -> None:
        self.results: list[GenerateResult | EncodeResult] = []
        self.lost: list[str] = []
        self.progress: list[tuple[str, float]] = []
        self.loop = FakeLoop()
        monkeypatch.setattr(leader_module, "LeaderLink", FakeLink)
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self.loop)
        self.leader = Leader(
            "generate",
            None,  # type: ignore[arg-type]
            "ipc://nowhere",
            secret="sesame",
            ranks=ranks,
            deadlines=limits,
            on_result=self.results.append,
            on_lost=self.lost.append,
            on_progress=lambda what, fraction: self.progress.append((what, fraction)),
        )
        monkeypatch.undo()
        self.link = FakeLink.made

    def hear(self, rank: int, report: Report) -> None:
        self.link.on_frame(rank_identity(rank), encode_report(report))  # type: ignore[operator]

    def enter(self, *ranks: int) -> None:
        for rank in ranks:
            self.hear(rank, Hello(rank, "sesame"))
        for rank in ranks:
            self.hear(rank, Ready(10 + rank, {"kv": rank}))

    def entries(self, rank: int = 0) -> list[Entry]:
        log = FollowerLog()
        return [log.accept(frames) for frames in self.link.sent.get(rank, [])]
