"""The shell: a kernel, the worker groups that carry its decisions out, and the streams of its requests.

Everything here runs on the event loop, and nothing between an event and the effects of its commands awaits. An event
that arises while commands are carried out (a stop string found in a token, say) waits until they are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vsched.aio.refusals import refusal_error
from vsched.aio.replicas.administration import GroupAdministration
from vsched.aio.replicas.groups import ServedGroups
from vsched.aio.replicas.supervisor import Reports, Supervisor
from vsched.aio.replicas.worker_group import STOP_GRACE_S, WorkerGroup, WorkerGroupEvents
from vsched.aio.replicas.worker_groups import WorkerGroups, smallest_cache
from vsched.aio.streams.stream import TokenStream
from vsched.aio.streams.table import StreamTable, int32_array
from vsched.errors import GroupLostError, RequestRefused, limit_message
from vsched.kernel import KernelPolicies, Scheduler, SchedulerLimits
from vsched.kernel.commands import (
    Accept,
    Command,
    Decide,
    Drained,
    EmitTokens,
    Finish,
    Notice,
    RefusalCode,
    Refuse,
    RestartGroup,
    SetTimer,
)
from vsched.kernel.events import (
    Aborted,
    Cleared,
    Encoded,
    EncodeFailed,
    Event,
    GroupLost,
    GroupReady,
    GroupRetired,
    Stepped,
    Submitted,
    TimerFired,
)
from vsched.types import FinishReason, Request
from vsched.wire import EncodeResult, GenerateResult

logger = logging.getLogger(__name__)
LIVE_SHOWN_MAX = 100
"""Live requests that statistics explain, oldest first."""
WorkerGroupFactory = Callable[[WorkerGroupEvents], list[WorkerGroup]]


class Recorder(Protocol):
    """Keeps what the kernel heard and decided; it never raises."""

    def note(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None:
        """Keep one event and its commands."""
        ...

    def close(self) -> None:
        """Keep nothing more."""
        ...


class Shell:
    """Serves requests with several encode and generate groups, which one kernel schedules.

    Attributes:
        administration: What an operator does with one group.
        given_up: Why nothing is served any more; empty while it is.
    """

    def __init__(
        self,
        worker_groups: WorkerGroupFactory,
        *,
        size: Callable[[int], SchedulerLimits],
        policies: KernelPolicies,
        on_progress: Callable[[str, str, float], None],
        drain_s: float = 30.0,
        record: Callable[[Scheduler], Recorder | None] = lambda _kernel: None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Prepare a shell; `size` gives the kernel's limits for a number of KV blocks of the smallest generate group.

        `record` opens the record of a kernel, if there is to be one. `now_ns` is the kernel's clock; a simulation
        hands in its own. (An event loop's clock may be as coarse as a millisecond.)
        """
        self._now_ns = now_ns
        self._size = size
        self._policies = policies
        self._record = record
        events = WorkerGroupEvents(
            on_result=self._on_result, on_lost=self._on_lost, on_progress=on_progress
        )
        self._crews = WorkerGroups(worker_groups(events))
        self._supervisors = [self._make_supervisor(worker_group) for worker_group in self._crews]
        self._groups = ServedGroups(self._supervisors)
        self.administration = GroupAdministration(self._groups, self.handle, drain_s=drain_s)
        self._loop = asyncio.get_running_loop()
        self._kernel: Scheduler | None = None
        self._recorder: Recorder | None = None
        self._events: deque[tuple[Event, GenerateResult | None]] = deque()
        self._handling = False
        self._result: GenerateResult | None = None
        self._streams = StreamTable(lambda request_id: self.end(request_id, FinishReason.ERROR))
        self._arriving: TokenStream | None = None
        self._refused: Refuse | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self.given_up = ""

    def _make_supervisor(self, worker_group: WorkerGroup) -> Supervisor:
        supervisor = Supervisor(
            worker_group,
            check=self._check_size,
            on_back=lambda: self._on_back(supervisor),
            on_failed=lambda reason: self._retire(supervisor, reason),
        )
        return supervisor

    # --- life ---

    async def start(self) -> None:
        """Start all worker groups in parallel and wait until they are ready (E12).

        Blocks: up to the deadline for readiness.

        Raises:
            CheckpointError, DeviceOutOfMemory, GroupLostError: When a worker group cannot start; the others stop.
        """
        reports = await self._crews.start()
        self._kernel = Scheduler(self._size(smallest_cache(reports)), self._policies)
        self._recorder = self._record(self._kernel)
        for group in reports:
            self.handle(GroupReady(group))

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End every request and every rank.

        Blocks: at most the grace; then ranks are killed.
        """
        self._stopping = True
        await self._end_supervisors()
        try:
            if self._kernel is not None:
                self.handle(Cleared("the server is stopping", "stopping"))
        finally:
            await self._crews.stop(grace_s=grace_s)
            if self._recorder is not None:
                self._recorder.close()

    # --- requests ---

    def submit(
        self, request: Request, stop_token_ids: tuple[int, ...], generation: TokenStream
    ) -> None:
        """Hand a request to the kernel; its tokens and its end go to `generation`.

        Raises:
            RequestRefused: When the kernel refuses it, or no group is left to serve it.
        """
        if self.given_up:
            raise self._unavailable()
        # It gets its id once it is accepted: a refused one may carry the id of another that runs.
        self._arriving = generation
        self._refused = None
        self.handle(Submitted(request, stop_token_ids))
        self._arriving = None
        if self.given_up:
            raise self._unavailable()
        refused = self._take_refused()
        if refused is not None:
            raise refusal_error(refused)

    def _take_refused(self) -> Refuse | None:
        refused, self._refused = self._refused, None
        return refused

    def _unavailable(self) -> RequestRefused:
        return refusal_error(Refuse("", RefusalCode.GIVEN_UP, reason=self.given_up))

    async def wait_idle(self) -> None:
        """Wait until no request is live.

        Blocks: without limit; wrap it in `asyncio.timeout`.
        """
        await self._streams.wait_idle()

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request early: its client left, or a stop string was found."""
        self.handle(Aborted(request_id, reason))

    def clear(self) -> None:
        """Interrupt every running and waiting request (E20)."""
        if self._kernel is not None:
            self.handle(Cleared())

    # --- events and commands ---

    def handle(self, event: Event, result: GenerateResult | None = None) -> None:
        """Hand an event to the kernel and carry its commands out; re-entrant calls wait in line.

        `result` has the tokens that the event speaks of.
        """
        self._events.append((event, result))
        if self._handling:
            return
        assert self._kernel is not None, "an event before the shell is ready"
        self._handling = True
        try:
            while self._events and not self.given_up:
                due, self._result = self._events.popleft()
                now_ns = self._now_ns()
                commands: Sequence[Command] = ()
                try:
                    commands = self._kernel.handle(due, now_ns)
                    self._carry_out(commands)
                finally:
                    # Also what the scheduler failed on: a replay fails there, too. Last, for it may take a moment.
                    if self._recorder is not None:
                        self._recorder.note(due, now_ns, commands)
        except Exception:
            logger.exception("the scheduler failed; every request is ended")
            self._give_up("the scheduler failed")
        finally:
            self._events.clear()
            self._handling = False

    def _give_up(self, reason: str) -> None:
        """Serve nothing more: every stream gets its end, and the ranks are stopped."""
        self.given_up = reason
        self._streams.fail_all(reason, code="given_up")
        if not self._stopping:
            self._ending = self._loop.create_task(self._end_worker_groups())

    async def _end_supervisors(self) -> None:
        await asyncio.gather(*(supervisor.end() for supervisor in self._supervisors))

    async def _end_worker_groups(self) -> None:
        await self._end_supervisors()  # or one would bring ranks back that nobody uses
        await self._crews.stop(grace_s=0)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        self._send(commands)  # first: ranks work while tokens are detokenized
        for command in commands:
            match command:
                case EmitTokens():
                    assert self._result is not None
                    self._streams.emit(self._result)
                case Finish():
                    self._streams.finish(command)
                case Accept(_, number):
                    assert self._arriving is not None, "accepted what nobody submitted"
                    self._streams.add(number, self._arriving)
                case Refuse():
                    self._refused = command
                case SetTimer(deadline_ns):
                    self._set_timer(deadline_ns)
                case Notice(message):
                    logger.warning("%s", message)
                case RestartGroup(group):
                    if not self._stopping:
                        self._groups[group].supervisor.begin()
                case Drained(group):
                    self._groups[group].drained.set()

    def _send(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Decide):
                self._groups[command.group].supervisor.worker_group.decide(
                    command.group, command.decision
                )

    def _set_timer(self, deadline_ns: int) -> None:
        """There is one timer: a new one takes the place of the old."""
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, (deadline_ns - self._now_ns()) / 1e9)
        self._timer = self._loop.call_later(delay_s, self.handle, TimerFired())

    # --- ranks ---

    def _on_result(self, name: str, result: GenerateResult | EncodeResult) -> None:
        group = self._groups[name]
        if self._stopping or self.given_up or group.down:
            return
        group.busy_ns += result.busy_ns
        if isinstance(result, EncodeResult):
            failed = EncodeFailed(result.step, result.error, name)
            self.handle(failed if result.error else Encoded(result.step, name))
            return
        expected = 4 * self.limits.slots
        if not len(result.tokens) == len(result.numbers) == expected:
            reason = f"{name}: a result of {len(result.tokens)} bytes, not {expected}"
            group.supervisor.worker_group.lose(reason)
            return
        tokens = int32_array(result.tokens)
        self.handle(Stepped(result.step, tokens, result.finished, result.busy_ns, name), result)

    def _on_lost(self, names: list[str], reason: str) -> None:
        if self._stopping or self.given_up:
            return
        if self._kernel is None:
            self._crews.lose_early(reason)
            return
        groups = [self._groups[name] for name in names]
        if groups[0].down:
            return  # its supervisor refused these ranks, and goes on with the next attempt
        groups[0].supervisor.note_loss(reason)
        for group in groups:
            group.down = True
        for name in names:
            self.handle(GroupLost(name, reason))

    def _on_back(self, supervisor: Supervisor) -> None:
        """The ranks of a lost worker group are up again; its requests go on where they were."""
        groups = self._groups.supervised_by(supervisor)
        for group in groups:
            group.down = False
        for group in groups:
            if not group.down:  # else it was lost again within this loop
                self.handle(GroupReady(group.name))
                self.administration.back(group)

    def _retire(self, supervisor: Supervisor, reason: str) -> None:
        """A worker group will not come back: others of its stages take its requests, if there are any."""
        groups = self._groups.supervised_by(supervisor)
        for group in groups:
            group.retired = reason
        if self._groups.gone_stage():
            self._give_up(f"{supervisor.names} could not be restarted")
            return
        for group in groups:
            self.handle(GroupRetired(group.name, reason))

    def _check_size(self, reports: Reports) -> None:
        """The kernel goes on with the blocks that it knows: a group with fewer cannot serve it."""
        blocks = smallest_cache(reports)
        if blocks and blocks < self.limits.blocks:
            raise GroupLostError(
                limit_message(
                    f"{' and '.join(reports)} came back with a smaller KV cache",
                    value=f"{blocks} blocks",
                    limit=f"at least {self.limits.blocks} blocks",
                    remedy="see what else takes the device's memory, or pin a smaller size",
                )
            )

    # --- views ---

    @property
    def healthy(self) -> bool:
        """Whether every group is up, and takes work."""
        return self._kernel is not None and self._groups.all_up() and not self.given_up

    @property
    def limits(self) -> SchedulerLimits:
        """The kernel's limits; the shell has started."""
        assert self._kernel is not None
        return self._kernel.limits

    def explain(self, request_id: str) -> str:
        """Return where a request is and why, in words."""
        return self._kernel.explain(request_id) if self._kernel is not None else ""

    def groups(self) -> list[dict[str, Any]]:
        """Return every group as an operator sees it; see `ServedGroup.row`."""
        statistics: dict[str, Any] = self._kernel.statistics() if self._kernel else {}
        return [group.row(statistics.get(group.stage, {})) for group in self._groups.values()]

    def statistics(self) -> dict[str, Any]:
        """Return the kernel's counters and the ranks' memory."""
        if self._kernel is None:
            return {}
        ids = self._streams.request_ids(LIVE_SHOWN_MAX)
        live = [{"request_id": one, "state": self._kernel.explain(one)} for one in ids]
        return {
            **self._kernel.statistics(),
            "ranks": self._crews.memory(),
            "busy_ms": self._groups.busy_ms(),
            "live": live,
        }

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks."""
        return self._crews.pids
