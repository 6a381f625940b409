"""Detection of failed ranks: the answers that each rank has to send, and since when.

Every rank answers every step and hook, in the order of the log. A rank's process also sends heartbeats from a thread of
its own, so a stopped process is detected during a step, and is not confused with a long step.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import msgspec

from vsched.failures import AnswerOverdue, GroupFailure, RankBacklogged, RankSilent
from vsched.transport.zmq_link import QUEUE_MAX
from vsched.wire import Turns


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts for ranks, in seconds; see the configuration section of the same name.

    `hooks_s` replaces the interval of every periodic hook; with 0, hooks run only on request of a rank, and with None
    the worker's intervals apply.
    """

    ready_s: float
    step_s: float
    heartbeat_s: float
    rank_timeout_s: float
    hooks_s: float | None = None


class RunningClock:
    """Running time of this process, by which timeouts are measured.

    After a suspended VM, frozen container or starved engine resumes, time passes before the frames of ranks that were
    suspended with it are read; they must not count as silent.
    """

    def __init__(self) -> None:
        self._looked_s = 0.0
        self._ran_s = 0.0

    def look(self, now_s: float, gap_max_s: float) -> float:
        """Return the running time at `now_s` in seconds; a gap since the last call counts as at most `gap_max_s`."""
        self._ran_s += min(max(now_s - self._looked_s, 0.0), gap_max_s)
        self._looked_s = now_s
        return self._ran_s


class ProcessLiveness:
    """Liveness of rank processes, shared by the leaders of the same processes.

    A process that serves two groups follows one log at a time: a message to either leader proves that it runs, and
    while it has to answer a step of either, only the deadline of that step counts.

    Attributes:
        turns: Orders the steps of all logs that these processes follow.
        clock: The clock for their timeouts.
        received_s: Time of the last message of a rank's log follower.
        pulse_s: Time of the last message of a rank's process.
        owing: Number of outstanding answers of a rank to all its leaders.
    """

    def __init__(self) -> None:
        self.turns = Turns()
        self.clock = RunningClock()
        self.received_s: dict[int, float] = {}
        self.pulse_s: dict[int, float] = {}
        self.owing: Counter[int] = Counter()

    def receive(self, rank: int, now_s: float, *, follows: bool) -> None:
        """Note a message of a rank; `follows` is True if its log follower sent it."""
        self.pulse_s[rank] = now_s
        if follows:
            self.received_s[rank] = now_s


class PendingAck(NamedTuple):
    """A step, or the hook at this position of the log, and the earliest time at which the rank could start it."""

    number: int
    hook: str
    since_s: float


class FailureDetector:
    """The outstanding answers of each rank of one group, oldest first."""

    def __init__(
        self, group: str, ranks: int, deadlines: Deadlines, liveness: ProcessLiveness
    ) -> None:
        self._groups = (group,)
        self._deadlines = deadlines
        self._liveness = liveness
        self._pending: list[deque[PendingAck]] = [deque() for _ in range(ranks)]

    def expect(self, number: int, now_s: float, *, hook: str = "") -> None:
        """Expect one more answer of every rank."""
        for rank, owed in enumerate(self._pending):
            owed.append(PendingAck(number, hook, now_s))
            self._liveness.owing[rank] += 1

    def due(self, rank: int) -> PendingAck | None:
        """Return the next answer expected of a rank."""
        return self._pending[rank][0] if self._pending[rank] else None

    def answered(self, rank: int, now_s: float) -> None:
        """Note the expected answer of a rank; the rank started the next step or hook after it."""
        owed = self._pending[rank]
        owed.popleft()
        self._liveness.owing[rank] -= 1
        if owed:
            owed[0] = owed[0]._replace(since_s=max(now_s, owed[0].since_s))

    def renew(self, number: int, now_s: float) -> None:
        """Restart the timeout of a step that paused and continues."""
        for owed in self._pending:
            if owed and not owed[0].hook and owed[0].number == number:
                owed[0] = owed[0]._replace(since_s=max(now_s, owed[0].since_s))

    def failure(self, now_s: float) -> GroupFailure | None:
        """Return the failure of a rank that is late or silent for too long; None if there is none."""
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
                waited_s = now_s - liveness.received_s.get(rank, now_s)
                if waited_s > silent_s:
                    return RankSilent(self._groups, rank, waited_s)
        return None

    def backlog(self) -> RankBacklogged | None:
        """Return the failure of a rank with more outstanding answers than its queue holds; None if there is none."""
        behind = (rank for rank, owed in enumerate(self._pending) if len(owed) > QUEUE_MAX)
        return next((RankBacklogged(self._groups, rank) for rank in behind), None)


class ResultComparison:
    """Compares the digests of a step's result from all ranks with the first rank's, in any order of arrival.

    Ranks answer in the order of the log and are given up if they are too far behind, so the memory is bounded.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._said: dict[int, dict[int, bytes]] = {}

    def add(self, rank: int, step: int, check: bytes) -> int | None:
        """Add the digest of a rank; return a rank whose digest differs from the first rank's."""
        said = self._said.setdefault(step, {})
        said[rank] = check
        if len(said) == self._ranks:
            del self._said[step]
        if 0 not in said:
            return None
        return next((other for other, one in said.items() if one != said[0]), None)

    def __len__(self) -> int:
        return len(self._said)
