"""Worker groups: the processes of a replica, their restarts, and the administration of the groups they serve.

The processes of a replica start, fail and stop together, independently of other replicas. With `placement = "separate"`
each group has its own worker group, so the loss of an encoder does not affect generate ranks. With `"together"` one
worker group serves an encode and a generate group in the same processes.

A lost worker group is restarted at once, then after increasing pauses, then never; losses of one never delay another.

An operator drains a group for maintenance of its device, for example, and resumes it afterwards. A restart drains all
groups of the worker group, then replaces its ranks. The last group of a stage that is up can be restarted, because its
requests wait for its return, but not drained: they would wait for an operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from vsched.aio.kv_sizing import Sizing
from vsched.aio.launcher import Host, LaunchedRank, Launcher
from vsched.aio.leader import Leader, ProcessLiveness, RankThreads
from vsched.config.sections import DeadlinesConfig
from vsched.errors import DeviceOutOfMemory, RequestRefused, failure_of, startup_error
from vsched.failures import (
    ErrorKind,
    GroupFailure,
    HostLost,
    LostTooOften,
    NotReady,
    ProcessExited,
    RankStopped,
    RestartedByOperator,
)
from vsched.kernel.events import Drain, Event, GroupLost, Resume
from vsched.probes import probe
from vsched.transport.arena import Arena
from vsched.types import stage_of
from vsched.wire import EncodeResult, GenerateResult, Ready
from vsched.worker.spec import EncodeRole, RankSpec

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Reports = dict[str, list[Ready]]
STOP_GRACE_S = 5.0
STARTING = "starting processes and importing libraries"
"""First progress message of a group, before its ranks have sent any."""
RESTART_DELAYS_S = (0.0, 1.0, 5.0, 15.0)
"""Pauses before restart attempts; after the last attempt the worker group is given up."""
LOSSES_WINDOW_S = 60.0
LOSSES_MAX = len(RESTART_DELAYS_S) + 1
"""Losses within the window skip the shorter pauses; after this many the worker group is given up."""


class WorkerGroupEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Callbacks of a worker group.

    Attributes:
        on_result: Gets each result, by group.
        on_lost: Called with all groups when the ranks are lost.
        on_progress: Gets the loading progress, by group.
        check: Raises if the ranks of a restart cannot be used.
        on_back, on_retired: One of the two is called once at the end of each restart.
    """

    on_result: Callable[[str, GenerateResult | EncodeResult], None]
    on_lost: Callable[[Sequence[str], GroupFailure], None]
    on_progress: Callable[[str, str, float], None]
    check: Callable[[Reports], None] = lambda _reports: None
    on_back: Callable[[Reports], None] = lambda _reports: None
    on_retired: Callable[[Sequence[str], GroupFailure], None] = lambda _groups, _failure: None


class WorkerGroup:
    """The ranks of one replica, which serve `groups` with the roles in `template`, and their restarts.

    Rank numbers, secret and devices are filled into the template for each rank and start; the host fills in the rest.

    Attributes:
        down: Whether the ranks are lost, or not in use yet.
        draining: Whether an operator restarts them, and their groups are being drained for that.
        retired: Why they will not be restarted; None while they may be.
        restarts: Number of successful restarts.
        losses: Number of unplanned losses by kind of failure.
        last_loss: The last loss, also a planned one, and its Unix time; None before the first.
    """

    def __init__(
        self,
        template: RankSpec,
        launcher: Launcher,
        arena: Arena,
        *,
        deadlines: DeadlinesConfig,
        events: WorkerGroupEvents,
        sizing: Sizing,
    ) -> None:
        served = [*template.roles]
        self.groups = list(template.groups)
        assert [*map(stage_of, self.groups)] == served, f"{self.groups} have roles {served}"
        self.down = self.draining = False
        self.retired: GroupFailure | None = None
        self.restarts = 0
        self.losses: Counter[str] = Counter()
        self.last_loss: tuple[GroupFailure, float] | None = None
        self._names = " and ".join(self.groups)
        self._template = template
        self._launcher = launcher
        self._arena = arena
        self._host: Host | None = None
        self._ranks = template.ranks
        self._deadlines = deadlines
        self._events = events
        self._sizing = sizing
        self._leaders: dict[str, Leader] = {}
        self._processes: list[LaunchedRank] = []
        self._phase: Literal["down", "starting", "up", "stopping"] = "down"
        self._loss: asyncio.Future[GroupFailure]
        self._doing = ""
        self._losses_s: deque[float] = deque(maxlen=LOSSES_MAX)
        self._restart_grace_s = 0.0
        self._restarting: asyncio.Task[None] | None = None

    # --- start and stop ---

    async def start(self) -> Reports:
        """Start all ranks in parallel and wait until all are ready; return their reports by group.

        Blocks: up to `deadlines.ready_s`.

        Raises:
            CheckpointError, ConfigError, DeviceOutOfMemory: When a rank reports it.
            DeviceOutOfMemory, MemoryLeak, PolicyError: When no size of the KV cache works.
            GroupLostError: When a rank exits otherwise, or is not ready in time.
        """
        self._phase = "starting"
        self._loss = asyncio.get_running_loop().create_future()
        for group in self.groups:
            self._progress(group, STARTING, 0.0)
        secret = secrets.token_hex(16)
        liveness, threads = ProcessLiveness(), RankThreads(self._names)
        self._close_host()
        host = self._host = self._launcher.choose_host(self.groups, self._arena, self._lose_host)
        self._leaders = {
            name: self._lead(host, name, secret, liveness, threads) for name in self.groups
        }
        self._processes = []
        # One by one: if a launch fails, `stop` ends the earlier ones.
        for rank in range(self._ranks):
            process = host.launch(self._spec(rank, secret), partial(self._exited, rank))
            self._processes.append(process)
        try:
            async with asyncio.timeout(self._deadlines.ready_s) as deadline:
                await all_or_first_error(
                    map(self._bring_up, self.groups), self._loss, startup_error
                )
        except Exception as failed:  # noqa: BLE001 - whatever it was, the ranks are stopped
            error = failed
            if deadline.expired():
                waiting_for = self._sizing.waited_for(self.groups)
                late = NotReady(tuple(self.groups), self._deadlines.ready_s, waiting_for)
                error = startup_error(late)
            elif self._loss.done():
                error = startup_error(self._loss.result())
            await self.stop(grace_s=0)
            raise self._with_settings(error) from None
        self._phase = "up"
        return {name: self._leaders[name].ready.result() for name in self.groups}

    def _with_settings(self, error: Exception) -> Exception:
        """Name both memory limits if a process has both stages: the error names only the limit of its stage."""
        template = self._template
        both = len(template.roles) > 1
        if not (both and template.memory_limit_bytes and isinstance(error, DeviceOutOfMemory)):
            return error
        said, keys = str(error).rstrip("."), template.memory_keys
        if keys in said:
            return error
        return DeviceOutOfMemory(
            f"{said}. One process has both stages, under a limit of {template.memory_limit_bytes} bytes: raise {keys}, "
            "for the two add up"
        )

    async def _bring_up(self, group: str) -> None:
        leader, sizing = self._leaders[group], self._sizing
        host = self._host.name if self._host is not None else ""
        take_part = sizing.publish if stage_of(group) == "encode" else sizing.lead
        await take_part(group, leader, host)
        await asyncio.shield(leader.ready)

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stop all ranks.

        Blocks: at most the grace period; then ranks are killed.
        """
        if self._phase != "up":
            grace_s = 0  # ranks that load do not read orders, and ranks of a lost group cannot be trusted to stop
        self._phase = "stopping"
        for leader in self._leaders.values():
            if grace_s > 0:
                leader.stop()
        try:
            await asyncio.gather(
                *(process.wait_exit(grace_s=grace_s) for process in self._processes)
            )
            self._processes = []
        finally:
            for leader in self._leaders.values():
                leader.close()
            self._close_host()
            self._phase = "down"

    def _close_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def _lead(
        self, host: Host, group: str, secret: str, liveness: ProcessLiveness, threads: RankThreads
    ) -> Leader:
        return Leader(
            group,
            partial(host.open_link, group),
            secret=secret,
            ranks=self._ranks,
            deadlines=self._deadlines,
            on_result=self._events.on_result,
            on_lost=self._lose,
            on_progress=partial(self._progress, group),
            liveness=liveness,
            threads=threads,
        )

    def _spec(self, rank: int, secret: str) -> RankSpec:
        template = self._template
        changes: dict[str, Any] = {}
        for group in self.groups:
            stage = stage_of(group)
            role = template.roles[stage]
            device = rank_device(role.settings.device, rank)
            settings = dataclasses.replace(
                role.settings, device=device, ranks=self._ranks, rank=rank
            )
            kept_bytes = self._sizing.reserved_bytes(group, rank)
            if isinstance(role, EncodeRole) and kept_bytes is not None:
                # Of the first start, so that it is not measured again.
                role = msgspec.structs.replace(role, reserved_bytes=kept_bytes)
            changes[stage] = msgspec.structs.replace(role, settings=settings)
        return msgspec.structs.replace(template, rank=rank, secret=secret, **changes)

    def _progress(self, group: str, what: str, fraction: float) -> None:
        self._doing = what
        self._events.on_progress(group, what, fraction)

    # --- losses and restarts ---

    def _exited(self, rank: int, code: int) -> None:
        if self._phase == "stopping":
            return
        for leader in self._leaders.values():
            leader.read_last_report()
        failure = ProcessExited(tuple(self.groups), rank, code)
        if self._phase != "up":
            limit_bytes, keys = self._template.memory_limit_bytes, self._template.memory_keys
            if self._host is not None and self._host.name and self._template.share.memory:
                limit_bytes = 0  # that host has its own limit
            failure = msgspec.structs.replace(
                failure,
                doing=self._doing,
                memory_limit=(limit_bytes, keys) if limit_bytes else None,
            )
        self._lose(failure)

    def _lose_host(self, what: str) -> None:
        host = self._host.name if self._host is not None else ""
        self._lose(HostLost(tuple(self.groups), host, what))

    def _lose(self, failure: GroupFailure) -> None:
        """Report the loss of all groups; only the first failure counts."""
        if self._phase == "stopping" or self._loss.done():
            return
        self._loss.set_result(failure)
        if self._phase != "up":
            return  # `start` is waiting, and raises it
        logger.error("lost: %s", failure)
        if self.down:
            return  # these ranks were rejected, and the next attempt replaces them
        if isinstance(failure, RankStopped) and failure.kind is ErrorKind.OUT_OF_MEMORY:
            self._sizing.ran_out(self.groups)
        self.down = True
        self.last_loss = (failure, time.time())
        self.losses[type(failure).__name__] += 1
        self._losses_s.append(asyncio.get_running_loop().time())
        self._restart_grace_s = 0.0
        self._events.on_lost(self.groups, failure)

    def plan_restart(self, failure: GroupFailure) -> None:
        """Note that an operator restarts the ranks: it does not count as a loss, and ranks get the grace period."""
        self.down = True
        self.last_loss = (failure, time.time())
        self._restart_grace_s = STOP_GRACE_S

    def revive(self) -> None:
        """Start retired ranks again and forget earlier losses, because an operator has intervened."""
        self.retired, self.down = None, True
        self._losses_s.clear()
        self.restart()

    def restart(self) -> None:
        """Start a restart, unless one is in progress: each group may request it."""
        if self._restarting is None:
            self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def wait_settled(self) -> None:
        """Wait until no restart is in progress, whether it succeeded or not.

        Blocks: up to all pauses and as many starts.
        """
        if self._restarting is not None:
            await asyncio.wait([self._restarting])

    async def cancel_restart(self) -> None:
        task, self._restarting = self._restarting, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _restart(self) -> None:
        """Restart at once, then after increasing pauses, then never."""
        failure: GroupFailure = LostTooOften(tuple(self.groups))
        since_s = asyncio.get_running_loop().time() - LOSSES_WINDOW_S
        recent = sum(1 for lost_s in self._losses_s if lost_s >= since_s)
        for delay_s in RESTART_DELAYS_S[max(recent, 1) - 1 :]:
            await asyncio.sleep(delay_s)
            try:
                await self.stop(grace_s=self._restart_grace_s)
                reports = await self.start()
                self._events.check(reports)
            except Exception as error:  # noqa: BLE001 - the next attempt may succeed
                probe("worker_group.start_failed")
                logger.warning("%s did not come back: %s", self._names, error)
                failure = failure_of(error, tuple(self.groups))
                continue
            self.restarts += 1
            self.down = False
            logger.warning("%s: up again", self._names)
            self._restarting = None  # now: the effects of the callback may restart it again
            self._events.on_back(reports)
            return
        # The last attempt may have left unusable ranks.
        await self.stop(grace_s=0)
        probe("worker_group.given_up")
        logger.error("could not be restarted: %s", failure)
        self.retired = failure
        self._restarting = None
        self._events.on_retired(self.groups, failure)

    # --- views ---

    def leader(self, group: str) -> Leader:
        """Return the leader of a group in the latest start; a leader of a lost group drops decisions."""
        return self._leaders[group]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid]


def rank_device(device: str, index: int) -> str:
    """Return the device `index` after this one; only `cuda` has several."""
    kind, _, first = device.partition(":")
    return f"{kind}:{int(first or 0) + index}" if kind == "cuda" else device


async def all_or_first_error(
    works: Iterable[Coroutine[Any, Any, Result]],
    loss: asyncio.Future[GroupFailure],
    error_of: Callable[[GroupFailure], Exception],
) -> list[Result]:
    """Run coroutines concurrently and return their results; the first error, or a loss, cancels the rest."""

    async def watch() -> NoReturn:
        raise error_of(await asyncio.shield(loss))

    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            tasks = [group.create_task(work) for work in works]
            await asyncio.wait(tasks)
            watching.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if loss.done():  # after the last one ended, when nothing watched any more
        raise error_of(loss.result())
    return [task.result() for task in tasks]


class ServedGroup:
    """One replica of a stage, with the state that it does not share with the other group of its processes.

    Attributes:
        drain_wanted: Whether an operator drains it; kept across a loss.
        drained: Set when nothing runs in the group.
        busy_ns: Compute time of its ranks so far.
    """

    def __init__(self, name: str, worker_group: WorkerGroup) -> None:
        self.name = name
        self.stage = stage_of(name)
        self.worker_group = worker_group
        self.drain_wanted = False
        self.drained = asyncio.Event()
        self.busy_ns = 0

    @property
    def leader(self) -> Leader:
        return self.worker_group.leader(self.name)

    @property
    def sizing(self) -> bool:
        """True while the KV cache of its new ranks is being sized."""
        return self.worker_group.down and self.leader.sizing

    @property
    def state(self) -> str:
        """One of `up`, `down`, `draining`, `retired`, as in the kernel's statistics."""
        if self.worker_group.retired is not None:
            return "retired"
        if self.worker_group.down:
            return "down"
        return "draining" if self.drain_wanted else "up"

    def row(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the operator's view of the group; `figures` are the kernel's statistics of its stage.

        `waiting` are requests, or items of an encode group, which count for the stage.
        """
        worker_group, leader = self.worker_group, self.leader
        threads, loss = leader.threads, None
        own = figures.get("groups", {}).get(self.name, {})
        if self.stage == "encode":
            running, waiting = own.get("running_items", 0), figures.get("waiting_items", 0)
        else:
            running = own.get("prefilling", 0) + own.get("decoding", 0)
            waiting = own.get("waiting", 0)
        if worker_group.last_loss is not None:
            failure, at_s = worker_group.last_loss
            when = dt.datetime.fromtimestamp(at_s, dt.UTC).isoformat()
            loss = {"kind": type(failure).__name__, "reason": str(failure), "at": when}
        return {
            "name": self.name,
            "stage": self.stage,
            "state": self.state,
            "ranks": [
                {
                    "rank": rank,
                    "pid": pid,
                    "memory": dict(leader.memory.get(rank, {})),
                    "kernels_late": leader.kernels_late.get(rank, 0),
                    "threads": threads[rank].active if rank in threads else None,
                }
                for rank, pid in enumerate(worker_group.pids)
            ],
            "running": running,
            "waiting": waiting,
            "busy_ms": self.busy_ns / 1e6,
            "heartbeats": leader.heartbeats,
            "restarts": worker_group.restarts,
            "losses": dict(worker_group.losses),
            "last_loss": loss,
        }


class ServedGroups(dict[str, ServedGroup]):
    """All groups by name; `handle` passes events to the kernel, and `drain_s` limits the time of each drain."""

    def __init__(
        self,
        worker_groups: Sequence[WorkerGroup],
        handle: Callable[[Event], None],
        *,
        drain_s: float,
    ) -> None:
        super().__init__(
            (name, ServedGroup(name, worker_group))
            for worker_group in worker_groups
            for name in worker_group.groups
        )
        self._handle = handle
        self._drain_s = drain_s

    def of_stage(self, stage: str) -> list[ServedGroup]:
        return [group for group in self.values() if group.stage == stage]

    def busy_ms(self) -> dict[str, float]:
        """Return the compute time of ranks by stage, and by group if a stage has several."""
        spent: dict[str, float] = {}
        for group in self.values():
            spent[group.stage] = spent.get(group.stage, 0.0) + group.busy_ns / 1e6
            if group.name != group.stage:
                spent[group.name] = group.busy_ns / 1e6
        return spent

    # --- administration ---

    async def drain(self, name: str) -> bool:
        """Give a group no new requests, and wait until it is idle; see `Engine.drain_group`."""
        group = self._known(name)
        self._check_state(group, "drain", "up", "draining")
        others = [one for one in self.of_stage(group.stage) if one.state == "up"]
        if others == [group]:
            raise _refused(
                f"{name} is the last {group.stage} group that is up, and requests would wait for an operator",
                code="last_group",
                remedy="restart it, or bring another one up before",
            )
        self._begin_drain(group)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await group.drained.wait()
        return group.drain_wanted and group.drained.is_set()  # it may have been resumed

    async def restart(self, name: str) -> bool:
        """Replace the ranks of a group after it is drained, or after the deadline; see `Engine.restart_group`.

        Requests that still run then continue after the restart, as after any loss. A retired group starts again.
        """
        worker_group = self._known(name).worker_group
        groups = [self[one] for one in worker_group.groups]
        for group in groups:
            self._check_state(group, "restart", "up", "draining", "retired")
        if worker_group.retired:
            for group in groups:
                group.drain_wanted = False
            worker_group.revive()
        else:
            await self._drain_all(worker_group, groups)
            if worker_group.down or worker_group.retired:
                probe("administration.lost_while_restarting")
            else:
                failure = RestartedByOperator(tuple(worker_group.groups))
                worker_group.plan_restart(failure)
                for group in groups:
                    self._handle(GroupLost(group.name, failure, planned=True))
        await worker_group.wait_settled()
        return all(group.state == "up" for group in groups)

    async def _drain_all(self, worker_group: WorkerGroup, groups: list[ServedGroup]) -> None:
        """Drain all groups of a worker group within the deadline; the encoder last, since running requests need it."""
        worker_group.draining = True
        try:
            async with asyncio.timeout(self._drain_s):
                for group in sorted(groups, key=lambda one: one.stage == "encode"):
                    self._begin_drain(group)
                    await group.drained.wait()
        except TimeoutError:
            probe("administration.drain_deadline")
            logger.warning(
                "%s: not drained in %g s, restarted now", worker_group.groups, self._drain_s
            )
        except BaseException:
            for group in groups:
                self._end_drain(group)
            raise
        finally:
            worker_group.draining = False
        for group in groups:
            group.drain_wanted = False  # it takes requests after the restart

    def resume(self, name: str) -> None:
        """Give requests to a drained or draining group again; see `Engine.resume_group`."""
        group = self._known(name)
        worker_group = group.worker_group
        if not group.drain_wanted or worker_group.draining or worker_group.retired:
            self._check_state(group, "resume", "draining")
        if not group.drained.is_set():
            probe("administration.resumed_while_draining")
        self._end_drain(group)

    def back(self, group: ServedGroup) -> None:
        """Handle the return of a lost group; a group that is to be drained continues to drain."""
        if group.drain_wanted:
            probe("administration.drain_outlives_loss")
            group.drained.clear()  # it may have been set before the loss, and requests have begun since
            self._handle(Drain(group.name))

    def _known(self, name: str) -> ServedGroup:
        if name not in self:
            known = ", ".join(self)
            raise RequestRefused(
                f"there is no group {name!r}. Remedy: name one of {known}.", code="unknown_group"
            )
        return self[name]

    def _check_state(self, group: ServedGroup, action: str, *allowed: str) -> None:
        state = "restarting" if group.worker_group.draining else group.state
        if state not in allowed:
            raise _refused(
                f"cannot {action} {group.name}, which is {state}",
                code="wrong_state",
                remedy=f"watch GET /admin/replicas until it is {' or '.join(allowed)}",
            )

    def _begin_drain(self, group: ServedGroup) -> None:
        if not group.drain_wanted:
            group.drain_wanted = True
            group.drained.clear()
            self._handle(Drain(group.name))

    def _end_drain(self, group: ServedGroup) -> None:
        group.drain_wanted = False
        group.drained.set()  # ends a waiting `drain`
        if not group.worker_group.down:
            self._handle(Resume(group.name))


def _refused(what: str, *, code: str, remedy: str) -> RequestRefused:
    return RequestRefused(f"{what}. Remedy: {remedy}.", code=code, status=409)
