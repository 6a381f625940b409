"""The shell: a kernel, the worker groups that execute its decisions, and the streams of its requests.

Everything runs on the event loop, without `await` between an event and the effects of its commands. Events that occur
while commands are executed, such as a stop string found in a token, are queued until they are done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from traceback import TracebackException
from types import MappingProxyType
from typing import Any, Protocol

from vsched.aio.arrivals import PendingArrival, PendingArrivals, refusal_error
from vsched.aio.streams import ChoiceSink, StreamTable, failure_of, int32_array
from vsched.aio.worker_groups import (
    STOP_GRACE_S,
    Reports,
    ServedGroup,
    ServedGroups,
    WorkerGroup,
    WorkerGroupEvents,
    all_or_first_error,
)
from vsched.errors import GroupLostError, RequestRefused, StartFailedError
from vsched.failures import GroupFailure
from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.arrivals import PREPARED
from vsched.kernel.commands import (
    Accept,
    AdmitArrival,
    Command,
    Decide,
    Drained,
    EmitTokens,
    Finish,
    Notice,
    RefusalCode,
    Refuse,
    RejectArrival,
    RestartGroup,
    SetTimer,
)
from vsched.kernel.events import (
    Aborted,
    Arrived,
    Cleared,
    Encoded,
    EncodeFailed,
    Event,
    FurtherChoice,
    GroupLost,
    GroupReady,
    GroupRetired,
    PolicyReplaced,
    Stepped,
    Submitted,
    TimerFired,
)
from vsched.kernel.live import RequestRow
from vsched.policy_host import SeatPolicies
from vsched.policy_host.call_times import PolicyTimes
from vsched.policy_host.stuck_calls import StuckCalls
from vsched.probes import probe
from vsched.types import FinishReason, Request, stage_of
from vsched.wire import EncodeResult, GenerateResult

logger = logging.getLogger(__name__)
NO_RESULT = GenerateResult(0, b"", b"", [], [], 0)
"""The result of events without tokens."""
LIVE_SHOWN_MAX = 100
"""Maximum number of live requests in the statistics, oldest first."""


class EventRecorder(Protocol):
    """Records events and commands of the kernel; never raises."""

    def record_event(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None: ...

    def close(self) -> None: ...


async def start_shell(
    make: Callable[[WorkerGroupEvents], Sequence[WorkerGroup]],
    *,
    limits: Callable[[int], SchedulerLimits],
    policies: SeatPolicies,
    on_progress: Callable[[str, str, float], None],
    drain_s: float = 30.0,
    call_budget_ms: float = 0.0,
    slow_calls_max: int = 0,
    call_limit_s: float = 0.0,
    record: Callable[[Scheduler], EventRecorder | None] = lambda _kernel: None,
    now_ns: Callable[[], int] = time.monotonic_ns,
    queued_ns: Callable[[], int] = lambda: 0,
) -> Shell:
    """Start all worker groups in parallel, wait until they are ready, and return a shell that serves with them.

    A policy is replaced when more than `slow_calls_max` of its latest calls took over `call_budget_ms`; with 0, never.
    A call that takes over `call_limit_s` is interrupted; with 0, none.
    `limits` returns the kernel's limits for the number of KV blocks of the smallest generate group. `record` opens the
    record of a kernel, or returns None. `now_ns` is the kernel's clock (an event loop's clock may be as coarse as a
    millisecond), and `queued_ns` a `QueueClock` for the timing of policies.

    Blocks: up to the deadline for readiness.

    Raises:
        CheckpointError, DeviceOutOfMemory, GroupLostError: When a worker group cannot start; the others are stopped.
    """
    shell = Shell(make, on_progress=on_progress, drain_s=drain_s, now_ns=now_ns)
    try:
        reports = await shell.start_worker_groups()
        kernel = Scheduler(limits(smallest_cache(reports)), policies)
        policy_times = PolicyTimes(
            budget_ms=call_budget_ms,
            slow_max=slow_calls_max,
            now_ns=now_ns,
            replace=lambda seat, reason: shell.handle(PolicyReplaced(seat, reason)),
            queued_ns=queued_ns,
        )
        shell.serve(kernel, policy_times, record(kernel), call_limit_s=call_limit_s)
    except BaseException:
        await stop_all(shell.worker_groups, grace_s=0)
        raise
    for group in reports:
        shell.handle(GroupReady(group))
    return shell


async def stop_all(worker_groups: Sequence[WorkerGroup], *, grace_s: float) -> None:
    """Stop all worker groups.

    Blocks: at most the grace period; then ranks are killed.
    """
    await asyncio.gather(*(worker_group.stop(grace_s=grace_s) for worker_group in worker_groups))


def smallest_cache(reports: Reports) -> int:
    """Return the KV blocks of the smallest generate group; 0 without generate groups."""
    sizes = [
        ready.kv_blocks
        for group, ranks in reports.items()
        if stage_of(group) == "generate"
        for ready in ranks
    ]
    return min(sizes, default=0)


class Shell:
    """Serves requests with encode and generate groups, which one kernel schedules.

    Attributes:
        worker_groups: The processes of all groups, in order.
        groups: All groups by name, and operator actions on single ones.
        restore_adapters: Called with a group that is back, before its first step.
        arrivals: Requests that are not submitted yet.
        kernel: The kernel; callers only read it.
        now_ns: The kernel's clock.
        given_up: Why nothing is served any more; empty while requests are served.
    """

    def __init__(
        self,
        make: Callable[[WorkerGroupEvents], Sequence[WorkerGroup]],
        *,
        on_progress: Callable[[str, str, float], None],
        drain_s: float,
        now_ns: Callable[[], int],
    ) -> None:
        """Create a shell that does not serve yet; see `start_shell`."""
        self.now_ns = now_ns
        self._loop = asyncio.get_running_loop()
        self._start_loss: asyncio.Future[GroupFailure] = self._loop.create_future()
        events = WorkerGroupEvents(
            on_result=self.on_result,
            on_lost=self.on_lost,
            on_progress=on_progress,
            check=self._check_size,
            on_back=self._on_back,
            on_retired=self._retire,
        )
        self.worker_groups = list(make(events))
        self.groups = ServedGroups(self.worker_groups, self.handle, drain_s=drain_s)
        self.restore_adapters: Callable[[ServedGroup], None] = lambda _group: None
        self.kernel: Scheduler
        self._policy_times: PolicyTimes
        self._record: EventRecorder | None = None
        self._stuck_calls: StuckCalls | None = None
        self._events: deque[tuple[Event, GenerateResult]] = deque()
        self._handling = False
        self._failures_logged: Mapping[str, TracebackException] = {}
        self._streams = StreamTable(
            lambda request_id: self.end_request(request_id, FinishReason.ERROR)
        )
        self.arrivals = PendingArrivals(self._take_arrival, now_ns)
        self._submitting: dict[str, ChoiceSink] = {}
        self._refused: Refuse | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._serving = self._stopping = False
        self.given_up = ""

    # --- the start ---

    async def start_worker_groups(self) -> Reports:
        """Start all in parallel, wait until they are ready, and return the reports of ranks by group.

        The loss of a group that was ready ends the start of all.
        """
        starts = [worker_group.start() for worker_group in self.worker_groups]
        # An error ends all: the others may wait for a report that never comes.
        started = await all_or_first_error(starts, self._start_loss, StartFailedError)
        return {group: ready for reports in started for group, ready in reports.items()}

    def serve(
        self,
        kernel: Scheduler,
        policy_times: PolicyTimes,
        record: EventRecorder | None,
        *,
        call_limit_s: float,
    ) -> None:
        self.kernel, self._policy_times, self._record = kernel, policy_times, record
        kernel.watch_policies(policy_times.watch)
        self._stuck_calls = StuckCalls(call_limit_s)
        self._serving = True

    # --- the end ---

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End all requests and all ranks.

        Blocks: at most the grace period; then ranks are killed.
        """
        self._stopping = True
        await self._cancel_restarts()
        try:
            self._interrupt(Cleared("the server is stopping", "stopping"))
        finally:
            await stop_all(self.worker_groups, grace_s=grace_s)
            if self._record is not None:
                self._record.close()
            if self._stuck_calls is not None:
                self._stuck_calls.close()

    # --- requests ---

    def submit(
        self,
        request: Request,
        stop_token_ids: tuple[int, ...],
        generation: ChoiceSink,
        further: Mapping[FurtherChoice, ChoiceSink] = MappingProxyType({}),
        *,
        arrival: PendingArrival | None = None,
        emitted: tuple[int, ...] = (),
    ) -> None:
        """Submit a request to the kernel; its output goes to `generation`, the output of further choices to `further`.

        `emitted` are tokens that it has already.

        Raises:
            RequestRefused: When the kernel refuses it, or no group is left to serve it.
        """
        if self.given_up:
            raise self._unavailable()
        # Not in the table before the kernel accepts it: a refused request may have the id of another that runs.
        self._submitting = {request.request_id: generation}
        self._submitting.update((each.request_id, stream) for each, stream in further.items())
        self._refused = None
        arrival_id = arrival.submitted() if arrival is not None else 0
        self.handle(Submitted(request, stop_token_ids, tuple(further), arrival_id, emitted))
        self._submitting = {}
        if self.given_up:
            raise self._unavailable()
        refused = self._take_refused()
        if refused is not None:
            raise refusal_error(refused)

    def _take_arrival(self, event: Event) -> None:
        if self.given_up and isinstance(event, Arrived):
            raise self._unavailable()
        self.handle(event)

    def _take_refused(self) -> Refuse | None:
        refused, self._refused = self._refused, None
        return refused

    def _unavailable(self) -> RequestRefused:
        return refusal_error(Refuse("", RefusalCode.GIVEN_UP, reason=self.given_up))

    async def wait_idle(self) -> None:
        """Wait until no request is live or in preparation; new requests extend the wait.

        Blocks: without limit; wrap it in `asyncio.timeout`.
        """
        await self.arrivals.wait_idle()
        await self._streams.wait_idle()

    def end_request(self, request_id: str, reason: FinishReason) -> None:
        """End a request early, because its client disconnected or a stop string was found."""
        self.handle(Aborted(request_id, reason))

    def clear(self) -> None:
        """Interrupt all requests: running, waiting and in preparation."""
        if any(group.sizing for group in self.groups.of_stage("generate")):
            probe("shell.clear_during_sizing")
        self._interrupt(Cleared())

    def _interrupt(self, event: Cleared) -> None:
        self.arrivals.interrupt(failure_of(event.message, code=event.code))
        self.handle(event)

    # --- events and commands ---

    def handle(self, event: Event, result: GenerateResult = NO_RESULT) -> None:
        """Pass an event to the kernel and execute its commands; a re-entrant call is queued.

        `result` has the tokens of the event.
        """
        self._events.append((event, result))
        if self._handling:
            probe("shell.event_waits")
            return
        self._handling = True
        try:
            while self._events and not self.given_up:
                due, due_result = self._events.popleft()
                now_ns = self.now_ns()
                commands: Sequence[Command] = ()
                try:
                    commands = self.kernel.handle(due, now_ns)
                    self._carry_out(commands, due_result)
                finally:
                    # Also the event on which the scheduler failed, so that a replay fails there, too. Last: it is slow.
                    if self._record is not None:
                        self._record.record_event(due, now_ns, commands)
                if self.kernel.given_up:
                    self._give_up(self.kernel.given_up)
        except Exception:
            logger.exception("the scheduler failed; every request is ended")
            self._give_up("the scheduler failed")
        finally:
            self._events.clear()
            self._handling = False

    def _give_up(self, reason: str) -> None:
        """Stop serving: end all streams with an error, and stop the ranks."""
        self.given_up = reason
        self.arrivals.interrupt(failure_of(reason, code="given_up"))
        self._streams.fail_all(reason, code="given_up")
        if not self._stopping:
            self._ending = self._loop.create_task(self._end_worker_groups())

    async def _cancel_restarts(self) -> None:
        await asyncio.gather(*(one.cancel_restart() for one in self.worker_groups))

    async def _end_worker_groups(self) -> None:
        await self._cancel_restarts()  # first, or they would start new ranks
        await stop_all(self.worker_groups, grace_s=0)

    def _carry_out(self, commands: Sequence[Command], result: GenerateResult) -> None:
        self._send(commands)  # first, so that ranks compute during detokenization
        for command in commands:
            match command:
                case EmitTokens():
                    self._streams.deliver_step(result)
                case Finish():
                    self._streams.deliver_finish(command)
                case Accept(request_id, number):
                    self._streams.add(number, self._submitting[request_id])
                case AdmitArrival() | RejectArrival():
                    self.arrivals.decide(command)
                case Refuse():
                    self._refused = command
                case SetTimer(deadline_ns):
                    self._set_timer(deadline_ns)
                case Notice(message):
                    logger.warning("%s", message)
                    self._log_policy_failures()
                case RestartGroup(group):
                    if not self._stopping:
                        self.groups[group].worker_group.restart()
                case Drained(group):
                    self.groups[group].drained.set()

    def _log_policy_failures(self) -> None:
        """Log the tracebacks that have not been logged: one for each policy and type of exception."""
        failures = self.kernel.policy_failures
        for name, trace in failures.items():
            if self._failures_logged.get(name) is not trace:
                logger.warning(
                    "policy %s failed for the first time:\n%s", name, "".join(trace.format())
                )
        self._failures_logged = dict(failures)

    def _send(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Decide):
                self.groups[command.group].leader.decide(command.decision)

    def _set_timer(self, deadline_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, (deadline_ns - self.now_ns()) / 1e9)
        self._timer = self._loop.call_later(delay_s, self.handle, TimerFired())

    # --- ranks ---

    def on_result(self, name: str, result: GenerateResult | EncodeResult) -> None:
        group = self.groups[name]
        down = group.worker_group.down
        if self._stopping or self.given_up or down:
            if down:
                probe("shell.result_after_loss")
            return
        group.busy_ns += result.busy_ns
        if isinstance(result, EncodeResult):
            if result.failure is None:
                self.handle(Encoded(result.step, name))
            else:
                self.handle(EncodeFailed(result.step, result.failure, name))
            return
        expected = 4 * self.limits.slots
        if not len(result.tokens) == len(result.numbers) == expected:
            group.leader.refuse(0, f"sent a result of {len(result.tokens)} bytes, not {expected}")
            return
        if result.prompts:
            self._streams.deliver_report(result.prompts)
        tokens = int32_array(result.tokens)
        finished, drafted = result.finished, result.drafted
        swaps = result.swap_ns, result.swap_blocks
        stepped = Stepped(result.step, tokens, finished, result.busy_ns, name, drafted, *swaps)
        self.handle(stepped, result)

    def on_lost(self, names: Sequence[str], failure: GroupFailure) -> None:
        """Report the loss of a worker group to the kernel; during the start, end that."""
        if not self._serving:
            if not self._start_loss.done():
                self._start_loss.set_result(failure)
            return
        if not (self._stopping or self.given_up):
            for name in names:
                self.handle(GroupLost(name, failure))

    def _on_back(self, reports: Reports) -> None:
        """Report the return of a lost worker group to the kernel; its requests continue."""
        groups = [self.groups[name] for name in reports]
        for group in groups:
            self.restore_adapters(group)
        for group in groups:
            if not group.worker_group.down:  # it may have been lost again within this loop
                blocks = smallest_cache({group.name: reports[group.name]})
                self.handle(GroupReady(group.name, min(blocks, self.limits.blocks)))
                self.groups.back(group)

    def _retire(self, names: Sequence[str], failure: GroupFailure) -> None:
        """Report groups that will not come back; the kernel gives up if it was the last of a stage."""
        for name in names:
            self.handle(GroupRetired(name, failure))

    def _check_size(self, reports: Reports) -> None:
        """Reject ranks with fewer KV blocks than a request may need."""
        blocks = smallest_cache(reports)
        if blocks and blocks < self.limits.blocks_min:
            raise GroupLostError.of_limit(
                f"{' and '.join(reports)} came back with a smaller KV cache",
                value=f"{blocks} blocks",
                limit=f"at least {self.limits.blocks_min} blocks",
                remedy="see what else takes the device's memory, or pin a smaller size",
            )

    # --- views ---

    @property
    def healthy(self) -> bool:
        """True if every group is up and takes requests."""
        return not self.given_up and all(one.state == "up" for one in self.groups.values())

    @property
    def limits(self) -> SchedulerLimits:
        return self.kernel.limits

    def explain(self, request_id: str) -> str:
        """Return the phase of a request and its reason, in words."""
        for arriving in self.arriving(len(self.arrivals), self.now_ns()):
            if arriving.request_id == request_id:
                return f"{arriving.phase}: {arriving.why}"
        return self.kernel.explain(request_id)

    def arriving(self, most: int, now_ns: int) -> list[RequestRow]:
        rows = []
        for arrival in self.arrivals.oldest(most):
            why = self.kernel.arrival_reason(arrival.arrival_id, now_ns) or PREPARED
            phase = "preparing" if why == PREPARED else "held"
            rows.append(
                RequestRow(
                    request_id=arrival.request_id,
                    phase=phase,
                    why=why,
                    since_ns=arrival.arrived_ns,
                    tenant=arrival.tenant,
                )
            )
        return rows

    def group_rows(self) -> list[dict[str, Any]]:
        statistics = self.kernel.statistics()
        return [group.row(statistics.get(group.stage, {})) for group in self.groups.values()]

    def statistics(self) -> dict[str, Any]:
        """Return the kernel's statistics, and memory and threads of ranks; requests in preparation count as waiting."""
        kernel = self.kernel.statistics()
        ids = self._streams.request_ids(LIVE_SHOWN_MAX)
        live = [{"request_id": one, "state": self.kernel.explain(one)} for one in ids]
        arriving = self.arriving(LIVE_SHOWN_MAX - len(live), self.now_ns())
        live += [
            {"request_id": one.request_id, "state": f"{one.phase}: {one.why}"} for one in arriving
        ]
        return {
            **kernel,
            "waiting": kernel["waiting"] + len(self.arrivals),
            "ranks": {
                name: {str(rank): dict(fields) for rank, fields in group.leader.memory.items()}
                for name, group in self.groups.items()
            },
            "threads": {
                name: {
                    str(rank): {"active": threads.active, "total": threads.total}
                    for rank, threads in group.leader.threads.items()
                }
                for name, group in self.groups.items()
            },
            "policy_calls": self._policy_times.statistics(),
            "busy_ms": self.groups.busy_ms(),
            "live": live,
        }

    @property
    def pids(self) -> list[int]:
        return [pid for worker_group in self.worker_groups for pid in worker_group.pids]
