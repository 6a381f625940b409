"""The processes behind one or two groups: they start, fail and stop together.

With `placement = "separate"` each group has a crew of its own, so a lost encoder leaves the generate ranks alone. With
`"together"` one crew serves both groups, in the same processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from vsched.aio.leader import Deadlines, Leader, Presence
from vsched.aio.process import RankProcess
from vsched.aio.sizing import Sizing
from vsched.errors import CheckpointError, DeviceOutOfMemory, GroupLost, PolicyError
from vsched.kernel.decisions import Decision
from vsched.wire import EncodeResult, GenerateResult, Ready
from vsched.worker.spec import EncodeRole, GenerateRole, RankSpec

logger = logging.getLogger(__name__)
STOP_GRACE_S = 5.0


class CrewEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a crew tells: results by group, the loss of all its groups, progress of loading by group."""

    on_result: Callable[[str, GenerateResult | EncodeResult], None]
    on_lost: Callable[[list[str], str], None]
    on_progress: Callable[[str, str, float], None]


class Crew:
    """The ranks of the groups that `template` has roles for; the template's addresses are filled in at each start."""

    def __init__(
        self,
        template: RankSpec,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        ranks: int,
        deadlines: Deadlines,
        events: CrewEvents,
        sizing: Sizing,
    ) -> None:
        self.groups = [
            name
            for name, role in (("encode", template.encode), ("generate", template.generate))
            if role is not None
        ]
        self._template = template
        self._context = context
        self._ranks = ranks
        roles = [role for role in (template.encode, template.generate) if role is not None]
        self._threads = max(role.settings.threads for role in roles)
        self._deadlines = deadlines
        self._events = events
        self._sizing = sizing
        self._leaders: dict[str, Leader] = {}
        self._processes: list[RankProcess] = []
        self._starts = 0
        self._failure = ""
        self._up = False
        self._stopping = False
        self._lost = asyncio.Event()

    async def start(self) -> dict[str, list[Ready]]:
        """Start all ranks in parallel and wait until every one is ready.

        Blocks: up to `deadlines.ready_s`.

        Raises:
            CheckpointError, DeviceOutOfMemory: When a rank says so.
            DeviceOutOfMemory, MemoryLeak, PolicyError: When no size of the KV cache will do.
            GroupLost: When a rank exits otherwise, or is not ready in time.
        """
        self._starts += 1
        self._failure = ""
        # A long-lived server's folder may have been swept from the temporary directory.
        os.makedirs(self._template.run_dir, mode=0o700, exist_ok=True)
        self._lost.clear()
        secret = secrets.token_hex(16)
        presence = Presence()
        self._leaders = {name: self._lead(name, secret, presence) for name in self.groups}
        self._processes = [
            RankProcess(
                self._spec(rank, secret), threads=self._threads, on_exit=self._exit_handler(rank)
            )
            for rank in range(self._ranks)
        ]
        loop = asyncio.get_running_loop()
        stages = [loop.create_task(self._bring_up(name)) for name in self.groups]
        lost = loop.create_task(self._lost.wait())
        try:
            async with asyncio.timeout(self._deadlines.ready_s):
                await _first_failure([*stages, lost], until=stages)
        except TimeoutError:
            self._failure = self._not_ready()
        finally:
            for task in (lost, *stages):
                task.cancel()
            # Awaited, or else the log complains that nobody asked how they ended.
            outcomes = await asyncio.gather(*stages, return_exceptions=True)
            await asyncio.gather(lost, return_exceptions=True)
        failures = [one for one in outcomes if isinstance(one, Exception)]
        if self._failure or failures:
            failure = _startup_error(self._failure) if self._failure else failures[0]
            await self.stop(grace_s=0)
            raise failure
        self._up = True
        return {name: self._leaders[name].ready.result() for name in self.groups}

    async def _bring_up(self, group: str) -> None:
        """See a group through to its readiness."""
        leader = self._leaders[group]
        if group == "encode":
            await self._sizing.publish(leader)
        else:
            await self._sizing.lead(leader)
        await asyncio.shield(leader.ready)

    def _not_ready(self) -> str:
        waiting = self._sizing.missing() if "generate" in self.groups else []
        reason = f"; {', '.join(waiting)} has not told what it reserves" if waiting else ""
        return (
            f"{' and '.join(self.groups)}: not ready after {self._deadlines.ready_s:g} s "
            f"(deadlines.ready_s){reason}"
        )

    def decide(self, group: str, decision: Decision) -> None:
        """Send a decision to a group; a group that is being lost drops it."""
        self._leaders[group].decide(decision)

    def lose(self, reason: str) -> None:
        """Give the crew up because of what one of its ranks sent."""
        self._lose(reason)

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stop all ranks.

        Blocks: at most the grace; then ranks are killed.
        """
        self._stopping = True
        if not self._up:
            grace_s = (
                0  # ranks that load do not listen, and those of a lost crew are not worth a wait
            )
        self._up = False
        for leader in self._leaders.values():
            if grace_s > 0:
                leader.stop()
        try:
            await asyncio.gather(*(process.end(grace_s=grace_s) for process in self._processes))
            self._processes = []
        finally:
            for leader in self._leaders.values():
                leader.close()
            self._stopping = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [process.pid for process in self._processes]

    def memory(self) -> dict[str, dict[int, dict[str, int]]]:
        """Return what the ranks last said of their memory, by group and rank, in bytes."""
        return {name: dict(leader.memory) for name, leader in self._leaders.items()}

    def _address(self, group: str) -> str:
        return f"ipc://{Path(self._template.run_dir) / f'{group}-{self._starts}'}"

    def _lead(self, group: str, secret: str, presence: Presence) -> Leader:
        return Leader(
            group,
            self._context,
            self._address(group),
            secret=secret,
            ranks=self._ranks,
            deadlines=self._deadlines,
            on_result=lambda result: self._events.on_result(group, result),
            on_lost=self._lose,
            on_progress=lambda what, fraction: self._events.on_progress(group, what, fraction),
            presence=presence,
        )

    def _spec(self, rank: int, secret: str) -> RankSpec:
        template = self._template
        encode: EncodeRole | None = template.encode
        generate: GenerateRole | None = template.generate
        if encode is not None:
            encode = msgspec.structs.replace(encode, address=self._address("encode"))
        if generate is not None:
            generate = msgspec.structs.replace(generate, address=self._address("generate"))
        return msgspec.structs.replace(
            template, rank=rank, secret=secret, encode=encode, generate=generate
        )

    def _exit_handler(self, rank: int) -> Callable[[int], None]:
        def on_exit(code: int) -> None:
            if not self._stopping:
                self._lose(f"rank {rank} exited with code {code}")

        return on_exit

    def _lose(self, reason: str) -> None:
        """All groups of the crew go down together; the first reason is the one to tell."""
        if self._stopping or self._failure:
            return
        self._failure = reason
        self._lost.set()
        if self._up:  # else `start` is still waiting, and raises
            logger.error("lost: %s", reason)
            self._events.on_lost(self.groups, reason)


async def _first_failure(
    tasks: Sequence[asyncio.Task[Any]], *, until: Sequence[asyncio.Task[Any]]
) -> None:
    """Wait until one of the tasks ends by itself that is not in `until`, one fails, or all of `until` are done."""
    pending = set(tasks)
    while not all(task.done() for task in until):
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if any(task not in until or task.exception() is not None for task in done):
            return


def _startup_error(failure: str) -> Exception:
    """Return the error that fits what a rank said before it went."""
    for error in (CheckpointError, DeviceOutOfMemory, PolicyError):
        if f" {error.__name__}: " in failure:
            return error(failure.split(f"{error.__name__}: ", 1)[1])
    return GroupLost(failure)
