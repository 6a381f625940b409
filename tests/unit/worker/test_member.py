"""What a rank reports of an encode step that pauses."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from vsched.kernel.decisions import EncodeDecision
from vsched.wire import (
    Continue,
    EncodeResult,
    Hello,
    LeaderLog,
    LogEntry,
    Paused,
    RankReport,
    StepCheck,
    decode_report,
)
from vsched.worker.member import Member, RankHost


class Link:
    """Delivers what is put into it at once, and keeps what is sent."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.sent: list[RankReport] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(decode_report(frame))

    def receive(self, _timeout_s: float = 0.0) -> bytes | None:
        return self.frames.popleft()

    def close(self) -> None:
        """Nothing to close."""


class StageExecutor:
    """Says one after the other what it was given, and takes as long as that says."""

    def __init__(self, *said: tuple[int, EncodeResult | Paused | None]) -> None:
        self.now_ns = 0
        self._said = deque(said)

    def wanted(self) -> list[str]:
        return ["balance"]

    def carry_out(self, _entry: LogEntry) -> EncodeResult | Paused | None:
        took_ns, said = self._said.popleft()
        self.now_ns += took_ns
        return said


@pytest.mark.parametrize("rank", [0, 1])
def test_member_reports_pauses_and_what_the_whole_step_took(rank: int) -> None:
    """The first rank says how long each time slice took, and at the end all of them; the others speak at the end."""
    side = StageExecutor(
        (5, Paused(1, 1, 0)),
        (7, Paused(1, 2, 0)),
        (9, EncodeResult(1, None, 0)),
        (100, None),
        (3, EncodeResult(2, None, 0)),
    )
    link = Link()
    spec = SimpleNamespace(rank=rank, secret="sesame")
    member = Member(spec, link, RankHost(now_ns=lambda: side.now_ns))  # type: ignore[arg-type]
    member.executor = side  # type: ignore[assignment]
    log = LeaderLog()
    order: list[LogEntry] = [EncodeDecision(1, [], 10, 1), Continue(1, 2), Continue(1, 2)]
    for entry in (*order, Continue(1, 0), EncodeDecision(2, [])):
        link.frames.append(log.append(entry))
        member.listen(0)
        assert member.log.turn == log.seq, "each has a turn"
        assert member.carry_out()
    assert link.sent == [Hello(rank, "sesame")] + (
        [StepCheck(1, b""), StepCheck(2, b"")]
        if rank
        else [
            Paused(1, 1, 5),
            Paused(1, 2, 7),
            EncodeResult(1, None, 21, ["balance"]),
            EncodeResult(2, None, 3, ["balance"]),
        ]
    )
