"""The processes of one replica: they start, fail and stop together, independently of other replicas.

With `placement = "separate"` each group has its own worker group, so the loss of an encoder does not affect generate
ranks. With `"together"` one worker group serves an encode and a generate group in the same processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from vsched.aio.kv_sizing import Sizing
from vsched.aio.leader.leader import Deadlines, Leader, ProcessLiveness
from vsched.aio.replicas.launcher import Host, LaunchedRank, Launcher
from vsched.errors import DeviceOutOfMemory, startup_error
from vsched.failures import GroupFailure, HostLost, NotReady, ProcessExited
from vsched.transport.arena import Arena
from vsched.types import stage_of
from vsched.wire import EncodeResult, GenerateResult, Ready, ThreadsInUse
from vsched.worker.spec import EncodeRole, GenerateRole, RankSpec, threads_of

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
STOP_GRACE_S = 5.0
THREADS_LAST_S = 5.0
"""A change of the number of threads is logged only after this time, so that short-lived other programs cause no log
lines."""
STARTING = "starting processes and importing libraries"
"""First progress message of a group, before its ranks have sent any."""


class WorkerGroupEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Callbacks of a worker group: results by group, the loss of all its groups, loading progress by group."""

    on_result: Callable[[str, GenerateResult | EncodeResult], None]
    on_lost: Callable[[Sequence[str], GroupFailure], None]
    on_progress: Callable[[str, str, float], None]


class WorkerGroup:
    """The ranks of one replica, which serve `groups` with the roles in `template`.

    Rank numbers, secret and devices are filled into the template for each rank and start; the host fills in the rest.
    """

    def __init__(
        self,
        template: RankSpec,
        launcher: Launcher,
        arena: Arena,
        *,
        groups: Sequence[str],
        ranks: int,
        deadlines: Deadlines,
        events: WorkerGroupEvents,
        sizing: Sizing,
    ) -> None:
        roles = {"encode": template.encode, "generate": template.generate}
        served = [stage for stage, role in roles.items() if role is not None]
        assert [stage_of(group) for group in groups] == served, f"{groups} have roles {served}"
        self.groups = list(groups)
        self._template = template
        self._launcher = launcher
        self._arena = arena
        self._host: Host | None = None
        self._ranks = ranks
        self._threads = threads_of(template)
        self._deadlines = deadlines
        self._events = events
        self._sizing = sizing
        self._leaders: dict[str, Leader] = {}
        self._threads_in_use = RankThreads(groups)
        self._processes: list[LaunchedRank] = []
        self._phase: Literal["down", "starting", "up", "stopping"] = "down"
        self._loss: asyncio.Future[GroupFailure]
        self._doing = ""

    async def start(self) -> dict[str, list[Ready]]:
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
        liveness = ProcessLiveness()
        self._close_host()
        host = self._host = self._launcher.choose_host(self.groups, self._arena, self._lose_host)
        self._threads_in_use = RankThreads(self.groups)
        self._leaders = {name: self._lead(host, name, secret, liveness) for name in self.groups}
        self._processes = []
        # One by one: if a launch fails, `stop` ends the earlier ones.
        for rank in range(self._ranks):
            spec, on_exit = self._spec(rank, secret), self._exit_handler(rank)
            process = host.launch(spec, threads=self._threads, on_exit=on_exit)
            self._processes.append(process)
        try:
            async with asyncio.timeout(self._deadlines.ready_s) as deadline:
                await all_or_first_error(map(self._bring_up, self.groups), self._raise_loss())
        except Exception as failed:  # noqa: BLE001 - whatever it was, the ranks are stopped
            error = failed
            if deadline.expired():
                error = startup_error(self._not_ready())
            elif self._loss.done():
                error = startup_error(self._loss.result())
            await self.stop(grace_s=0)
            raise self._with_settings(error) from None
        self._phase = "up"
        return {name: self._leaders[name].ready.result() for name in self.groups}

    def _with_settings(self, error: Exception) -> Exception:
        """Name both memory limits if a process has both stages: the error names only the limit of its stage."""
        template = self._template
        both = template.encode is not None and template.generate is not None
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
        """Size a group and wait until its ranks are ready."""
        leader = self._leaders[group]
        if stage_of(group) == "encode":
            await self._sizing.publish(group, leader)
        else:
            await self._sizing.lead(group, leader)
        await asyncio.shield(leader.ready)

    async def _raise_loss(self) -> NoReturn:
        raise startup_error(await asyncio.shield(self._loss))

    def _not_ready(self) -> GroupFailure:
        waiting_for = self._sizing.waited_for(self.groups)
        return NotReady(tuple(self.groups), self._deadlines.ready_s, waiting_for)

    def leader(self, group: str) -> Leader:
        """Return the leader of a group in the latest start; a leader of a lost group drops decisions."""
        return self._leaders[group]

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
            await asyncio.gather(*(process.end(grace_s=grace_s) for process in self._processes))
            self._processes = []
        finally:
            for leader in self._leaders.values():
                leader.close()
            self._threads_in_use.close()
            self._close_host()
            self._phase = "down"

    def _close_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that have a process."""
        return [process.pid for process in self._processes if process.pid]

    def memory(self) -> dict[str, dict[int, dict[str, int]]]:
        """Return the ranks' last memory reports by group and rank, in bytes."""
        return {name: dict(leader.memory) for name, leader in self._leaders.items()}

    def kernels_late(self, group: str) -> dict[int, int]:
        """Return the number of kernels that each rank of a group compiled or loaded after it was ready."""
        leader = self._leaders.get(group)
        return dict(leader.kernels_late) if leader else {}

    def threads(self) -> dict[int, ThreadsInUse]:
        """Return the threads in use by each rank that reports them."""
        return dict(self._threads_in_use.in_use)

    def heartbeats(self, group: str) -> dict[str, int]:
        """Return the number of heartbeats sent and missed since the latest start."""
        leader = self._leaders.get(group)
        sent, missed = (leader.heartbeats, leader.heartbeats_missed) if leader else (0, 0)
        return {"sent": sent, "missed": missed}

    def _lead(self, host: Host, group: str, secret: str, liveness: ProcessLiveness) -> Leader:
        return Leader(
            group,
            partial(host.open_link, group),
            secret=secret,
            ranks=self._ranks,
            deadlines=self._deadlines,
            on_result=self._events.on_result,
            on_lost=self._lose,
            on_threads=self._threads_in_use.take,
            on_progress=partial(self._progress, group),
            liveness=liveness,
        )

    def _spec(self, rank: int, secret: str) -> RankSpec:
        template = self._template
        changes: dict[str, Any] = {}
        for group in self.groups:
            stage = stage_of(group)
            role: EncodeRole | GenerateRole = getattr(template, stage)
            settings = dataclasses.replace(
                role.settings,
                device=rank_device(role.settings.device, rank),
                ranks=self._ranks,
                rank=rank,
            )
            if isinstance(role, EncodeRole):
                role = self._with_share(role, group, rank)
            changes[stage] = msgspec.structs.replace(role, settings=settings)
        name = f"{' and '.join(self.groups)} rank {rank}"
        return msgspec.structs.replace(template, rank=rank, secret=secret, name=name, **changes)

    def _with_share(self, role: EncodeRole, group: str, rank: int) -> EncodeRole:
        """Return a role with the reservation of the first start, so that it is not measured again."""
        kept_bytes = self._sizing.reserved_bytes(group, rank)
        return (
            role if kept_bytes is None else msgspec.structs.replace(role, reserved_bytes=kept_bytes)
        )

    def _progress(self, group: str, what: str, fraction: float) -> None:
        self._doing = what
        self._events.on_progress(group, what, fraction)

    def _exit_handler(self, rank: int) -> Callable[[int], None]:
        def on_exit(code: int) -> None:
            if self._phase == "stopping":
                return
            for leader in self._leaders.values():
                leader.hear_out()
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

        return on_exit

    def _lose_host(self, what: str) -> None:
        host = self._host.name if self._host is not None else ""
        self._lose(HostLost(tuple(self.groups), host, what))

    def _lose(self, failure: GroupFailure) -> None:
        """Report the loss of all groups; only the first failure counts."""
        if self._phase == "stopping" or self._loss.done():
            return
        self._loss.set_result(failure)
        if self._phase == "up":  # otherwise `start` is waiting, and raises it
            logger.error("lost: %s", failure)
            self._events.on_lost(self.groups, failure)


class RankThreads:
    """The last thread report of each rank of one start; a lasting change is logged once.

    Attributes:
        in_use: The last report of each rank.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        self.in_use: dict[int, ThreadsInUse] = {}
        self._names = " and ".join(groups)
        self._logged: dict[int, int] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def take(self, rank: int, report: ThreadsInUse) -> None:
        """Take the report of a rank; groups in one process report the same number twice."""
        if report == self.in_use.get(rank):
            return
        self.in_use[rank] = report
        self._cancel(rank)
        if report.active != self._logged.setdefault(rank, report.total):
            loop = asyncio.get_running_loop()
            self._timers[rank] = loop.call_later(THREADS_LAST_S, self._log, rank, report)

    def close(self) -> None:
        """Stop logging."""
        for rank in list(self._timers):
            self._cancel(rank)

    def _cancel(self, rank: int) -> None:
        timer = self._timers.pop(rank, None)
        if timer is not None:
            timer.cancel()

    def _log(self, rank: int, report: ThreadsInUse) -> None:
        del self._timers[rank]
        self._logged[rank] = report.active
        who, active, total = f"{self._names} rank {rank}", report.active, report.total
        if active < total:
            why = "other programs keep the cores busy"
            logger.warning("%s computes with %d of %d threads: %s", who, active, total, why)
        else:
            logger.info("%s computes with all of its %d threads again", who, total)


def rank_device(device: str, index: int) -> str:
    """Return the device `index` after this one; only `cuda` has several."""
    kind, _, first = device.partition(":")
    return f"{kind}:{int(first or 0) + index}" if kind == "cuda" else device


async def all_or_first_error(
    works: Iterable[Coroutine[Any, Any, Result]], watch: Coroutine[Any, Any, NoReturn]
) -> list[Result]:
    """Run coroutines concurrently and return their results; the first error, also from `watch`, cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch)
            tasks = [group.create_task(work) for work in works]
            await asyncio.wait(tasks)
            watching.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
