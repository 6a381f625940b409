"""The leader of one group: its decision log, its link to the ranks, heartbeats, deadlines, failure detection.

Every rank answers every step, hook and change of adapters, in the order of the log. A rank's process also sends
heartbeats from a thread of its own, so a stopped process is detected during a step, and is not confused with a long
step.

One timer is due slightly less than a heartbeat interval after the last entry was sent. When it fires, the leader sends
a heartbeat if nothing was sent in between, and checks for late ranks. So the gap between entries never exceeds one
interval.

Results of the first rank are used at once. The other ranks send digests of their results, which are compared with the
first rank's; if one differs, the group is lost.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from vsched.config.sections import DeadlinesConfig
from vsched.failures import (
    AnswerOverdue,
    ErrorKind,
    GroupFailure,
    RankBacklogged,
    RanksDiffer,
    RankSilent,
    RankStopped,
    RankUnreachable,
    ReportRefused,
    StepTooLong,
)
from vsched.kernel.decisions import Decision, EncodeDecision
from vsched.memory import Sized
from vsched.probes import probe
from vsched.transport.zmq_link import QUEUE_MAX, OnFrame, pulse_identity, rank_identity
from vsched.types import stage_of
from vsched.wire import (
    AcceptKv,
    AdapterChanged,
    AddAdapter,
    Beat,
    Continue,
    EncodeResult,
    GenerateResult,
    Heartbeat,
    Hello,
    LeaderLog,
    Loaded,
    Loading,
    LogEntry,
    Paused,
    RankFailed,
    RankReport,
    Ready,
    RemoveAdapter,
    RunHook,
    SizeKv,
    StepCheck,
    Stop,
    ThreadsInUse,
    check_of,
    undamaged_report,
)


class ProcessLiveness:
    """Liveness of rank processes, shared by the leaders of the same processes.

    A process that serves two groups follows one log at a time: a message to either leader proves that it runs, and
    while it has to answer a step of either, only the deadline of that step counts.

    Attributes:
        turns: Orders the steps of all logs that these processes follow.
        follower_s: Last message of a rank's log follower.
        process_s: Last message of its process, heartbeats included.
        owing: Number of answers that each rank owes to all its leaders.
    """

    def __init__(self) -> None:
        self.turns = itertools.count(1)
        self._last_call_s = 0.0
        self._ran_s = 0.0
        self.follower_s: dict[int, float] = {}
        self.process_s: dict[int, float] = {}
        self.owing: Counter[int] = Counter()

    def running_s(self, now_s: float, gap_max_s: float) -> float:
        """Return the running time of this process at `now_s`, by which timeouts are measured.

        A gap since the last call counts as at most `gap_max_s`: after a suspended VM, frozen container or starved
        engine resumes, time passes before the frames of ranks that were suspended with it are read; they must not
        count as silent.
        """
        self._ran_s += min(max(now_s - self._last_call_s, 0.0), gap_max_s)
        self._last_call_s = now_s
        return self._ran_s

    def note_message(self, rank: int, now_s: float, *, follows: bool) -> None:
        """Note a message of a rank; `follows` is True if its log follower sent it."""
        self.process_s[rank] = now_s
        if follows:
            self.follower_s[rank] = now_s


@dataclass(slots=True)
class Expected:
    """A step, a hook or a change of adapters that every rank answers.

    Attributes:
        number: Number of the step; for a hook or change of adapters, its position in the log.
        hook: Its name; empty for a step.
        sent_s: Time at which it was sent.
        answers: The digest of a step's result, or the error of a change, by rank.
        complete: Done with all answers, by rank, if it is awaited.
    """

    number: int
    hook: str
    sent_s: float
    answers: dict[int, Any] = field(default_factory=dict)
    complete: asyncio.Future[list[Any]] | None = None


class FailureDetector:
    """The outstanding answers of each rank of one group, oldest first.

    Ranks answer in the order of the log and are given up if they are too far behind, so the memory is bounded.
    """

    def __init__(
        self, group: str, ranks: int, deadlines: DeadlinesConfig, liveness: ProcessLiveness
    ) -> None:
        self._groups = (group,)
        self._deadlines = deadlines
        self._liveness = liveness
        self._pending: list[deque[Expected]] = [deque() for _ in range(ranks)]
        self._began_s = [0.0] * ranks
        """Earliest time at which each rank could start its oldest pending work, unless that was sent later."""

    def expect(self, number: int, now_s: float, *, hook: str = "") -> Expected:
        expected = Expected(number, hook, now_s)
        for rank, owed in enumerate(self._pending):
            owed.append(expected)
            self._liveness.owing[rank] += 1
        return expected

    def due(self, rank: int) -> Expected | None:
        return self._pending[rank][0] if self._pending[rank] else None

    def answered(self, rank: int, now_s: float, answer: bytes | str = "") -> Expected:
        """Take the expected answer of a rank; the rank started the next step or hook after it."""
        expected = self._pending[rank].popleft()
        self._liveness.owing[rank] -= 1
        self._began_s[rank] = now_s
        answers, complete = expected.answers, expected.complete
        answers[rank] = answer
        if complete is not None and len(answers) == len(self._pending) and not complete.done():
            complete.set_result([answers[one] for one in sorted(answers)])
        return expected

    def restart_timeout(self, number: int, now_s: float) -> None:
        """Restart the timeout of a step that paused and continues."""
        for rank, owed in enumerate(self._pending):
            if owed and not owed[0].hook and owed[0].number == number:
                self._began_s[rank] = now_s

    def failure(self, now_s: float) -> GroupFailure | None:
        """Return the failure of a rank that is late or silent for too long; None if there is none."""
        limits, liveness = self._deadlines, self._liveness
        silent_s = limits.rank_timeout_s + limits.heartbeat_s
        for rank, owed in enumerate(self._pending):
            waited_s = now_s - liveness.process_s.get(rank, now_s)
            if waited_s > silent_s:
                return RankSilent(self._groups, rank, waited_s)
            if owed:
                due = owed[0]
                waited_s = now_s - max(due.sent_s, self._began_s[rank])
                if waited_s > limits.step_s:
                    return AnswerOverdue(
                        self._groups, rank, due.number, due.hook, waited_s, limits.step_s
                    )
            elif not liveness.owing[rank]:
                waited_s = now_s - liveness.follower_s.get(rank, now_s)
                if waited_s > silent_s:
                    return RankSilent(self._groups, rank, waited_s)
        return None

    def backlog(self) -> RankBacklogged | None:
        """Return the failure of a rank with more outstanding answers than its queue holds; None if there is none."""
        behind = (rank for rank, owed in enumerate(self._pending) if len(owed) > QUEUE_MAX)
        return next((RankBacklogged(self._groups, rank) for rank in behind), None)

    def cancel(self) -> None:
        """Cancel everything that is awaited."""
        for expected in itertools.chain(*self._pending):
            if expected.complete is not None:
                expected.complete.cancel()


THREADS_LAST_S = 5.0
"""Minimum duration of a logged change of the number of threads: short-lived other programs cause no log lines."""


class HookTimes:
    """The hooks of one group.

    A hook is due when its interval has passed since the end of its last run, and there were steps in between: nothing
    changes while a group is idle.
    """

    def __init__(self, intervals: Mapping[str, float], now_s: float) -> None:
        self._intervals = intervals
        self._ended_s = dict.fromkeys(intervals, now_s)
        """End of the last run of each hook that does not run now."""
        self._worked: set[str] = set()

    def stepped(self) -> None:
        self._worked.update(self._intervals)

    def take_due(self, now_s: float) -> list[str]:
        """Return the hooks to run now; they count as running until `done`."""
        due = [
            name
            for name, ended_s in self._ended_s.items()
            if name in self._worked and now_s - ended_s >= self._intervals[name]
        ]
        for name in due:
            del self._ended_s[name]
        self._worked.difference_update(due)
        return due

    def done(self, name: str, now_s: float) -> None:
        self._ended_s[name] = now_s


class RankThreads(dict[int, ThreadsInUse]):
    """Threads in use by each rank that reports them, shared by the leaders of the same processes.

    A change is logged if it lasts for `THREADS_LAST_S`; `groups` are named in the line.
    """

    def __init__(self, groups: str) -> None:
        super().__init__()
        self._groups = groups
        self._changed_s: dict[int, float] = {}
        self._logged: dict[int, int] = {}

    def add_report(self, rank: int, report: ThreadsInUse, now_s: float) -> None:
        if self.get(rank) != report:
            self[rank], self._changed_s[rank] = report, now_s

    def log_changes(self, now_s: float) -> None:
        for rank, report in self.items():
            active, total = report.active, report.total
            lasts = now_s - self._changed_s[rank] >= THREADS_LAST_S
            if not lasts or active == self._logged.get(rank, total):
                continue
            self._logged[rank] = active
            if active < total:
                line = (
                    "%s rank %d computes with %d of %d threads: other programs keep the cores busy"
                )
                logger.warning(line, self._groups, rank, active, total)
            else:
                line = "%s rank %d computes with all of its %d threads again"
                logger.info(line, self._groups, rank, total)


class EncodeSlices:
    """The time slices of one encode group.

    Attributes:
        open: Whether a batch in flight is encoded in time slices.
        busy_ns: Total time of its slices so far.
    """

    def __init__(self) -> None:
        self.open = False
        self.busy_ns = 0
        self._time_slice_ns = 0
        self._tokens = 0
        self._layer_ns, self._layer_tokens = 0.0, 0

    def begin_batch(self, decision: EncodeDecision) -> EncodeDecision:
        self._time_slice_ns = decision.time_slice_ns
        self._tokens = sum(task.tokens for task in decision.tasks if not task.encoded)
        self.open = bool(self._time_slice_ns and self._tokens)
        self.busy_ns = 0
        return msgspec.structs.replace(decision, layers=self._layers()) if self.open else decision

    def take_pause(self, paused: Paused) -> int:
        """Return the layers of the next slice; the slowest slice of a batch sets the time per layer."""
        layer_ns = paused.busy_ns / paused.layers
        self._layer_ns = max(layer_ns, self._layer_ns) if self.busy_ns else layer_ns
        self._layer_tokens = self._tokens
        self.busy_ns += paused.busy_ns
        return self._layers()

    def end_batch(self) -> bool:
        """Note the end of the batch; return True if it was encoded in time slices."""
        was_open, self.open = self.open, False
        return was_open

    def _layers(self) -> int:
        """Return the number of layers that fit, at least one; one before the first measurement."""
        if not self._layer_ns:
            return 1
        # More tokens: longer layers. Fewer: not shorter, since a whole layer may replace a part of one.
        scale = max(self._tokens / self._layer_tokens, 1.0)
        return max(1, int(self._time_slice_ns / (self._layer_ns * scale)))


class LeaderEnd(Protocol):
    """The leader's end of the links to the ranks of one group; see `vsched.transport.zmq_link.LeaderLink`."""

    def carry(self, entry: LogEntry) -> None:
        """Prepare for an entry whose frames are sent next: the arena bytes that it reads must arrive before it."""

    def send(self, rank: int, frame: bytes) -> bool:
        """Queue a frame for a rank, without waiting; return False if it is gone or backlogged."""

    def read(self) -> None:
        """Handle all frames that have arrived."""

    def close(self) -> None:
        """Stop receiving and drop queued frames."""


BEAT_FRACTION = 0.9
"""Heartbeats are sent after this part of the interval, to allow for late timers and transfer times."""

GAP_INTERVALS = 2
"""Maximum gap between two readings of the clock, in heartbeat intervals; in a longer gap this process was suspended."""

logger = logging.getLogger(__name__)
Report = TypeVar("Report")

PEER_REPORT_S = 0.5
"""Time to wait for the report of a failed rank after another rank reports its loss."""


class _Gather(Generic[Report]):
    """Collects one report of each rank; `complete` is done with all of them, by rank."""

    def __init__(self, ranks: int) -> None:
        loop = asyncio.get_running_loop()
        self.complete: asyncio.Future[list[Report]] = loop.create_future()
        self._ranks = ranks
        self._by_rank: dict[int, Report] = {}

    def add_report(self, rank: int, report: Report) -> None:
        """Add the report of a rank; only its first counts."""
        self._by_rank.setdefault(rank, report)
        if len(self._by_rank) == self._ranks and not self.complete.done():
            self.complete.set_result([self._by_rank[rank] for rank in range(self._ranks)])


class Leader:
    """Leads the ranks of one group.

    `on_result` gets the name of the group and the result of each step. `on_lost` is called once, with the failure, when
    the group is lost.

    Attributes:
        memory: Last memory report of each rank, in bytes by name.
        kernels_late: Number of kernels that each rank compiled or loaded after it was ready.
        threads: Threads in use by each rank that reports them.
        heartbeats: Number of heartbeats sent.
    """

    def __init__(
        self,
        name: str,
        open_link: Callable[[OnFrame], LeaderEnd],
        *,
        secret: str,
        ranks: int,
        deadlines: DeadlinesConfig,
        on_result: Callable[[str, GenerateResult | EncodeResult], None],
        on_lost: Callable[[GroupFailure], None],
        on_progress: Callable[[str, float], None],
        liveness: ProcessLiveness | None = None,
        threads: RankThreads | None = None,
    ) -> None:
        assert secret, "an empty secret would let anybody in"
        self.name = name
        self._groups = (name,)
        self.memory: dict[int, dict[str, int]] = {}
        self.kernels_late: dict[int, int] = {}
        self.threads = RankThreads(name) if threads is None else threads
        self.heartbeats = 0
        self.loaded = _Gather[Loaded](ranks)
        self.ready: asyncio.Future[list[Ready]] = asyncio.get_running_loop().create_future()
        self._votes = _Gather[Sized](ranks)
        self._secret = secret
        self._ranks = ranks
        self._deadlines = deadlines
        self._on_result = on_result
        self._on_lost = on_lost
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._liveness = liveness or ProcessLiveness()
        self._log = LeaderLog(self._liveness.turns)
        self._link = open_link(self._on_frame)
        self._known = {rank_identity(rank): rank for rank in range(ranks)}
        self._pulses = {pulse_identity(rank): rank for rank in range(ranks)}
        self._proved: set[bytes] = set()
        self._disagreed = False
        self._detector = FailureDetector(name, ranks, deadlines, self._liveness)
        self._hooks = HookTimes({}, self._loop.time())
        self._slices = EncodeSlices()
        self._changes: deque[tuple[AddAdapter | RemoveAdapter, asyncio.Future[list[str]]]] = deque()
        """Changes of adapters that are not sent yet, while a batch pauses."""
        self._beat_s = BEAT_FRACTION * deadlines.heartbeat_s
        self._ready: dict[int, Ready] = {}
        self._sent_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    # --- sending ---

    def decide(self, decision: Decision) -> None:
        self._run_hooks()
        self._hooks.stepped()
        self._detector.expect(decision.step, self._running_s())
        if isinstance(decision, EncodeDecision):
            decision = self._slices.begin_batch(decision)
        self._append(decision)
        backlog = self._detector.backlog()
        if backlog is not None:
            self.report_loss(backlog)

    def _run_hooks(self) -> None:
        """Have every rank run the hooks that are due, unless a step is in the middle of its time slices."""
        if self._slices.open:
            return
        for name in self._hooks.take_due(self._loop.time()):
            self._append(RunHook(name))
            self._detector.expect(self._log.seq, self._running_s(), hook=name)

    async def size(self, order: SizeKv) -> list[Sized]:
        """Have every rank execute an order about its KV cache; return the votes of all, by rank.

        Blocks: until the slowest rank has; the deadline for readiness applies.
        """
        self._votes = _Gather[Sized](self._ranks)
        self._append(msgspec.structs.replace(order, reset_peers=self._disagreed))
        votes = await self._votes.complete
        self._disagreed = len({vote.outcome for vote in votes}) > 1
        if self._disagreed:
            probe("leader.votes_differ")
        return votes

    def change_adapters(self, entry: AddAdapter | RemoveAdapter) -> asyncio.Future[list[str]]:
        """Have every rank add or remove an adapter; the result has each rank's error, empty on success.

        The future is cancelled if the group is lost first; a rank that does not answer in time loses the group. A
        change waits until a batch that pauses is done: the batch may use the adapter, and answers are in order.
        """
        complete: asyncio.Future[list[str]] = self._loop.create_future()
        if self._over:
            complete.cancel()
            return complete
        self._changes.append((entry, complete))
        if not self._slices.open:
            self._send_changes()
        return complete

    def _send_changes(self) -> None:
        while self._changes and not self._over:
            entry, complete = self._changes.popleft()
            what = "add" if isinstance(entry, AddAdapter) else "remove"
            hook, now_s = f"{what} adapter {entry.number}", self._running_s()
            self._detector.expect(self._log.seq + 1, now_s, hook=hook).complete = complete
            self._append(entry)

    def accept(self, blocks: int) -> None:
        self._append(AcceptKv(blocks))

    def stop(self) -> None:
        if not self._over:
            self._append(Stop())

    def _append(self, entry: LogEntry) -> None:
        frame = self._log.append(entry)
        self.heartbeats += isinstance(entry, Heartbeat)
        self._sent_s = self._loop.time()
        self._link.carry(entry)
        for rank in range(self._ranks):
            if not self._link.send(rank, frame):
                self._link.read()  # its last report may say why
                self.report_loss(RankUnreachable(self._groups, rank))
                return

    def close(self) -> None:
        """Stop; no callback is called any more."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._cancel_awaited()
        for waited_for in (self.ready, self.loaded.complete, self._votes.complete):
            waited_for.cancel()
        self._link.close()

    def _cancel_awaited(self) -> None:
        self._detector.cancel()
        for _, complete in self._changes:
            complete.cancel()

    def read_last_report(self) -> None:
        """Read the last report of a rank that has ended, which says more than its exit code."""
        if not self._over:
            self._link.read()

    def report_loss(self, failure: GroupFailure) -> None:
        """Report the loss of the group, once."""
        if not self._over:
            self._over = True
            self._cancel_awaited()
            self._on_lost(failure)

    def refuse(self, rank: int, what: str) -> None:
        """Lose the group because of an invalid report of a rank."""
        self.report_loss(ReportRefused(self._groups, rank, what))

    @property
    def sizing(self) -> bool:
        """True while the KV cache of loaded ranks is being sized."""
        return self.loaded.complete.done() and not self.ready.done()

    # --- receiving ---

    def _on_frame(self, identity: bytes, frame: bytes) -> None:
        pulse = identity in self._pulses
        rank = self._pulses.get(identity) if pulse else self._known.get(identity)
        if rank is None or self._over:
            return
        report = undamaged_report(frame)
        if report is None:
            if identity in self._proved:
                self.refuse(rank, "sent a frame that is no report")
            return
        if isinstance(report, Hello) and report.rank == rank:
            said, secret = report.secret.encode(), self._secret.encode()
            if hmac.compare_digest(said, secret):
                self._proved.add(identity)
        if identity not in self._proved:
            logger.warning("%s: dropped a report of an unauthenticated peer", self.name)
            return
        self._liveness.note_message(rank, self._running_s(), follows=not pulse)
        if not pulse:
            self._on_report(rank, report)

    def _on_report(self, rank: int, report: RankReport) -> None:
        match report:
            case Paused():
                self._take_pause(rank, report)
            case GenerateResult() | EncodeResult() | StepCheck():
                self._take_answer(rank, report)
            case Beat(seq, memory, late):
                self.memory[rank] = {**self.memory.get(rank, {}), **memory}
                self.kernels_late[rank] = late
                self._take_beat(rank, seq)
            case ThreadsInUse():
                self.threads.add_report(rank, report, self._loop.time())
            case AdapterChanged(seq, error):
                self._take_change(rank, seq, error)
            case RankFailed():
                self._take_failure(rank, report)
            case Loading(what, fraction):
                if rank == 0:
                    self._on_progress(what, fraction)
            case Loaded():
                self.loaded.add_report(rank, report)
            case Sized():
                self._votes.add_report(rank, report)
            case Ready():
                self._take_ready(rank, report)
            case _:  # only a sign of life
                pass

    def _take_failure(self, rank: int, report: RankFailed) -> None:
        failure = RankStopped(self._groups, rank, report.kind, report.error, report.message)
        if report.kind is ErrorKind.PEER_LOST:
            # The report of the lost rank itself may still arrive, and says more.
            self._loop.call_later(PEER_REPORT_S, self.report_loss, failure)
        else:
            self.report_loss(failure)

    def _take_ready(self, rank: int, report: Ready) -> None:
        self.memory[rank] = report.memory
        self._ready[rank] = report
        if report.threads is not None:
            self.threads.add_report(rank, report.threads, self._loop.time())
        if len(self._ready) == self._ranks and not self.ready.done():
            self._start_timeouts()

    def _start_timeouts(self) -> None:
        """Start timeouts and hooks, when all ranks are ready."""
        first = self._ready[0]
        for rank, one in self._ready.items():
            if (one.kv_blocks, one.hooks) != (first.kv_blocks, first.hooks):
                what = (
                    f"is ready with {one.kv_blocks} KV blocks and hooks {one.hooks}, rank 0 with "
                    f"{first.kv_blocks} and {first.hooks}"
                )
                self.report_loss(RanksDiffer(self._groups, rank, what))
                return
        for rank in range(self._ranks):
            self._liveness.note_message(rank, self._running_s(), follows=True)
        now_s = self._loop.time()
        self._hooks = HookTimes(first.hooks, now_s)
        self._timer = self._loop.call_later(self._beat_s, self._tick)
        self.ready.set_result([self._ready[rank] for rank in range(self._ranks)])

    def _take_answer(self, rank: int, answer: GenerateResult | EncodeResult | StepCheck) -> None:
        wanted: type = GenerateResult if stage_of(self.name) == "generate" else EncodeResult
        due = self._detector.due(rank)
        if due is None or due.hook or not isinstance(answer, StepCheck if rank else wanted):
            self.refuse(rank, "sent a result, but no step is due")
            return
        if answer.step != due.number:
            what = f"sent the result of step {answer.step}, but step {due.number} is due"
            self.refuse(rank, what)
            return
        now_s, check = self._running_s(), b""
        if self._ranks > 1:
            check = answer.check if isinstance(answer, StepCheck) else check_of(answer)
        said = self._detector.answered(rank, now_s, check).answers
        other = next((one for one in said if said[one] != said.get(0, said[one])), None)
        if other is not None:
            what = f"has another result of step {answer.step} than rank 0"
            self.report_loss(RanksDiffer(self._groups, other, what))
            return
        if isinstance(answer, StepCheck):
            return
        if isinstance(answer, EncodeResult):
            self._end_slices(answer)
        self._on_result(self.name, answer)

    def _end_slices(self, result: EncodeResult) -> None:
        was_open = self._slices.end_batch()
        if was_open and result.failure and self._ranks > 1:
            # Other ranks may wait for their next slice: they continue, and fail as soon as they need this rank.
            self._append(Continue(result.step, 0))
        self._send_changes()

    def _take_pause(self, rank: int, paused: Paused) -> None:
        """Continue an encode step, after the steps of the generate group that were sent in between."""
        due = self._detector.due(rank)
        expected = self._slices.open and due is not None and due.number == paused.step
        if rank or paused.layers < 1 or not expected:
            self.refuse(rank, f"paused in step {paused.step}, which is not encoded in time slices")
            return
        self._detector.restart_timeout(paused.step, self._running_s())
        layers = self._slices.take_pause(paused)
        busy_s, limit_s = self._slices.busy_ns / 1e9, self._deadlines.step_s
        if busy_s > limit_s:
            self.report_loss(StepTooLong(self._groups, rank, paused.step, busy_s, limit_s))
            return
        self._append(Continue(paused.step, layers))

    def _take_beat(self, rank: int, seq: int) -> None:
        due = self._detector.due(rank)
        if due is not None and due.hook and due.number == seq:
            self._detector.answered(rank, self._running_s())
            if rank == 0:
                self._hooks.done(due.hook, self._loop.time())

    def _take_change(self, rank: int, seq: int, error: str) -> None:
        due = self._detector.due(rank)
        if due is None or due.complete is None or due.number != seq:
            self.refuse(rank, "reported a change of adapters that is not due")
            return
        self._detector.answered(rank, self._running_s(), error)

    def _running_s(self) -> float:
        """Return the clock of all timeouts, which counts only the running time of this process."""
        gap_max_s = GAP_INTERVALS * self._deadlines.heartbeat_s
        return self._liveness.running_s(self._loop.time(), gap_max_s)

    def _tick(self) -> None:
        if self._over:
            return
        now_s = self._loop.time()
        failure = self._detector.failure(self._running_s())
        if failure is not None:
            self.report_loss(failure)
            return
        self._run_hooks()
        self.threads.log_changes(now_s)
        if now_s >= self._sent_s + self._beat_s:
            self._append(Heartbeat())
        due_s = self._sent_s + self._beat_s
        self._timer = self._loop.call_later(due_s - now_s, self._tick)
