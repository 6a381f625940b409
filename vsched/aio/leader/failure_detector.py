"""What the ranks of a group owe their leader, and since when: the one place that knows what is late.

Every step and every hook that is sent is owed an answer by each rank, in the order of the log. A rank's process shows
that it runs by a pulse of its own, so one that was stopped is found while a step is out, and one whose step is merely
long is not taken for it.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import msgspec

from vsched.failures import AnswerOverdue, GroupFailure, RankBacklogged, RankSilent
from vsched.transport.zmq_link import QUEUE_MAX
from vsched.wire import Turns


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for ranks, in seconds; see the configuration section of the same name.

    `hooks_s` stands for the interval of every periodic hook, 0 for none but what ranks ask for; None leaves it to the
    worker.
    """

    ready_s: float
    step_s: float
    heartbeat_s: float
    rank_timeout_s: float
    hooks_s: float | None = None


class RunningClock:
    """Time in which this process ran, for judging others: a stop of the whole machine is no silence of a rank.

    A suspended VM, a frozen container or a starved engine wakes up before the ranks that stood still with it are heard.
    """

    def __init__(self) -> None:
        self._looked_s = 0.0
        self._ran_s = 0.0

    def look(self, now_s: float, gap_max_s: float) -> float:
        """Return the running time in seconds at `now_s`; a gap between two looks counts as `gap_max_s` at most."""
        self._ran_s += min(max(now_s - self._looked_s, 0.0), gap_max_s)
        self._looked_s = now_s
        return self._ran_s


class ProcessLiveness:
    """What is known of the rank processes; shared by the leaders of the same processes.

    A process that serves two groups follows one log at a time: what either leader hears proves that it does, and while
    it owes either of them a step, that step's deadline is the one that counts.

    Attributes:
        turns: Orders the steps of all logs that these processes follow.
        clock: The time by which they are judged.
        heard_s: When a rank's log follower was last heard.
        pulse_s: When anything of its process was.
        owing: Answers that a rank owes to all its leaders.
    """

    def __init__(self) -> None:
        self.turns = Turns()
        self.clock = RunningClock()
        self.heard_s: dict[int, float] = {}
        self.pulse_s: dict[int, float] = {}
        self.owing: Counter[int] = Counter()

    def hear(self, rank: int, now_s: float, *, follows: bool) -> None:
        """Take note of a sign of life; `follows` says that it comes from what follows the log."""
        self.pulse_s[rank] = now_s
        if follows:
            self.heard_s[rank] = now_s


class PendingAck(NamedTuple):
    """A step, or the hook that stands at this place of the log, and since when the rank could be at work on it."""

    number: int
    hook: str
    since_s: float


class FailureDetector:
    """What each rank of one group owes, oldest first."""

    def __init__(
        self, group: str, ranks: int, deadlines: Deadlines, liveness: ProcessLiveness
    ) -> None:
        self._groups = (group,)
        self._deadlines = deadlines
        self._liveness = liveness
        self._pending: list[deque[PendingAck]] = [deque() for _ in range(ranks)]

    def expect(self, number: int, now_s: float, *, hook: str = "") -> None:
        """Every rank owes an answer more."""
        for rank, owed in enumerate(self._pending):
            owed.append(PendingAck(number, hook, now_s))
            self._liveness.owing[rank] += 1

    def due(self, rank: int) -> PendingAck | None:
        """Return what a rank has to answer next."""
        return self._pending[rank][0] if self._pending[rank] else None

    def answered(self, rank: int, now_s: float) -> None:
        """A rank has answered what was due; the next began when that was done."""
        owed = self._pending[rank]
        owed.popleft()
        self._liveness.owing[rank] -= 1
        if owed:
            owed[0] = owed[0]._replace(since_s=max(now_s, owed[0].since_s))

    def renew(self, number: int, now_s: float) -> None:
        """A step has paused, and goes on: its time runs from now."""
        for owed in self._pending:
            if owed and not owed[0].hook and owed[0].number == number:
                owed[0] = owed[0]._replace(since_s=max(now_s, owed[0].since_s))

    def failure(self, now_s: float) -> GroupFailure | None:
        """Return which rank is late, or silent, for too long; None when none is."""
        limits, liveness = self._deadlines, self._liveness
        silent_s = limits.rank_timeout_s + limits.heartbeat_s
        for rank, owed in enumerate(self._pending):
            waited_s = now_s - liveness.pulse_s.get(rank, now_s)
            if waited_s > silent_s:
                return RankSilent(self._groups, rank, waited_s)
            if owed:
                waited_s = now_s - owed[0].since_s
                if waited_s > limits.step_s:
                    step, hook, _ = owed[0]
                    return AnswerOverdue(self._groups, rank, step, hook, waited_s, limits.step_s)
            elif not liveness.owing[rank]:
                waited_s = now_s - liveness.heard_s.get(rank, now_s)
                if waited_s > silent_s:
                    return RankSilent(self._groups, rank, waited_s)
        return None

    def backlog(self) -> RankBacklogged | None:
        """Return a rank that is further behind than its queue is long."""
        behind = (rank for rank, owed in enumerate(self._pending) if len(owed) > QUEUE_MAX)
        return next((RankBacklogged(self._groups, rank) for rank in behind), None)


class ResultComparison:
    """Compares what the other ranks say of a step with what the first says, whoever speaks first.

    Each rank answers in the order of the log and is given up when it is too far behind, so what is kept is bounded.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._said: dict[int, dict[int, bytes]] = {}

    def add(self, rank: int, step: int, check: bytes) -> int | None:
        """Take what a rank says; return a rank that says something else than the first."""
        said = self._said.setdefault(step, {})
        said[rank] = check
        if len(said) == self._ranks:
            del self._said[step]
        if 0 not in said:
            return None
        return next((other for other, one in said.items() if one != said[0]), None)

    def __len__(self) -> int:
        return len(self._said)
