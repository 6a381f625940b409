"""A process that follows two logs carries their steps out in the one order in which they were decided."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from tests.unit.worker.test_member import FakeWorker, Link
from vsched import rank as rank_module
from vsched.errors import GroupLostError, RankDesync
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.wire import Continue, EncodeResult, Heartbeat, LeaderLog, LogEntry, Stop
from vsched.worker.member import Member, Rank
from vsched.worker.stage_rank import StageRank

Done = list[tuple[str, int]]


class Noting(StageRank):
    """The rank of one log, which records its steps."""

    def __init__(self, name: str, done: Done) -> None:
        super().__init__(FakeWorker())
        self._name = name
        self._done = done

    def carry_out(self, entry: LogEntry) -> EncodeResult:
        assert isinstance(entry, GenerateDecision | EncodeDecision | Continue)
        self._done.append((self._name, entry.step))
        return EncodeResult(entry.step, None, 0)


class SlowLink(Link):
    """A link whose frames arrive when they are waited for."""

    def __init__(self, following: Following) -> None:
        super().__init__()
        self._following = following

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        if timeout_s:
            self._following.wait([self], timeout_s)
        return super().receive()


class Following:
    """Two members of one process; `late` holds frames that the links have not delivered yet.

    Attributes:
        waits: Timeout of each wait; in the one of the number `silent_at` nothing arrives.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, silent_at: int = 0) -> None:
        monkeypatch.setattr(rank_module, "wait_readable", self.wait)
        self.done: Done = []
        self.late: list[tuple[str, bytes]] = []
        self.waits: list[float] = []
        self.turns = itertools.count(1)
        self.logs = {name: LeaderLog(self.turns) for name in ("encode", "generate")}
        self._silent_at = silent_at
        spec = SimpleNamespace(rank=0, secret="sesame")
        self.members = {name: Member(spec, SlowLink(self)) for name in self.logs}  # type: ignore[arg-type]
        for name, member in self.members.items():
            member.stage = Noting(name, self.done)

    def decide(self, name: str, entry: LogEntry) -> None:
        self.late.append((name, self.logs[name].append(entry)))

    def follow(self, *names: str) -> None:
        """Execute the entries of these members, or of both, until the end."""
        members = [self.members[name] for name in names or self.members]
        spec = SimpleNamespace(timeout_s=60.0)
        rank = Rank(spec, None, members)  # type: ignore[arg-type]
        while not rank.over:
            rank_module.step(rank, 60.0)  # type: ignore[arg-type]

    def wait(self, links: list[SlowLink], timeout_s: float) -> bool:
        """Deliver frames until one of these links has one."""
        self.waits.append(timeout_s)
        assert len(self.waits) < 1000, "it waits for ever"
        while not any(link.frames for link in links):
            if not self.late or len(self.waits) == self._silent_at:
                return False
            name, frame = self.late.pop(0)
            self.members[name].link.frames.append(frame)
        return True


def shuffled(late: list[tuple[str, bytes]], seed: int) -> list[tuple[str, bytes]]:
    """Return the frames in an order that keeps the order of each link."""
    rng = random.Random(seed)
    by_name: dict[str, list[tuple[str, bytes]]] = {"encode": [], "generate": []}
    for name, frame in late:
        by_name[name].append((name, frame))
    mixed = []
    while any(by_name.values()):
        name = rng.choice([name for name, frames in by_name.items() if frames])
        mixed.append(by_name[name].pop(0))
    return mixed


@pytest.mark.parametrize("seed", range(4))
def test_follow_keeps_the_order_of_turns(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever the links' delays, all ranks run the same steps in order; none waits for a peer in another step."""
    following = Following(monkeypatch)
    rng = random.Random(seed)
    expected: Done = []
    steps = {"encode": 0, "generate": 0}
    for _ in range(40):
        name = rng.choice(["encode", "generate"])
        steps[name] += 1
        if rng.random() < 0.2:
            following.decide(rng.choice(["encode", "generate"]), Heartbeat())
        step = steps[name]
        encode = Continue(step, 1) if rng.random() < 0.4 else EncodeDecision(step, [])
        following.decide(name, encode if name == "encode" else GenerateDecision(step))
        expected.append((name, step))
    following.late = shuffled(following.late, seed)
    following.decide("generate", Stop())
    following.decide("encode", Stop())
    following.follow()
    # The stop of one log ends the process; steps that were decided before it in the other may be left.
    assert following.done == expected[: len(following.done)]
    assert len(following.done) >= sum(name == "generate" for name, _ in expected)


def test_follow_stops_where_no_log_has_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that is missing in both logs is a divergence, not a wait for ever."""
    following = Following(monkeypatch)
    next(following.turns)
    following.decide("encode", EncodeDecision(1, []))
    following.decide("generate", GenerateDecision(1))
    with pytest.raises(RankDesync, match="waits for a turn that none of them has"):
        following.follow()
    assert following.done == []


@pytest.mark.parametrize("names", [["generate"], ["encode", "generate"]])
def test_follow_listens_once_more_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """After a stop of the whole machine, the timeout has passed before a live engine could send anything.

    A rank whose engine stays silent stops.
    """
    following = Following(monkeypatch, silent_at=2)
    following.decide("generate", GenerateDecision(1))
    following.decide("generate", Heartbeat())
    with pytest.raises(GroupLostError, match="heard nothing from the engine for 60 s"):
        following.follow(*names)
    assert following.done == [("generate", 1)]
    assert following.waits[2] == 15.0
