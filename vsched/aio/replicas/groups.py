"""The groups of a shell, and their administration while the others serve: drain, restart and resume.

A group is drained for maintenance of its device, for example, and resumed afterwards. A restart drains all groups of
the worker group, then replaces its ranks. The last group of a stage that is up can be restarted, because its requests
wait for its return, but not drained: they would wait for an operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vsched.aio.leader.leader import Leader
from vsched.aio.replicas.supervisor import LastLoss, Supervisor
from vsched.errors import RequestRefused
from vsched.failures import RestartedByOperator
from vsched.kernel.events import Drain, Event, GroupLost, Resume
from vsched.probes import probe
from vsched.types import stage_of

logger = logging.getLogger(__name__)


class ServedGroup:
    """One replica of a stage.

    Attributes:
        supervisor: The worker group and its state, which the other groups of the same processes share.
        drain_wanted: Whether an operator drains it; kept across a loss.
        drained: Set when nothing runs in the group.
        busy_ns: Compute time of its ranks so far.
    """

    def __init__(self, name: str, supervisor: Supervisor) -> None:
        self.name = name
        self.stage = stage_of(name)
        self.supervisor = supervisor
        self.drain_wanted = False
        self.drained = asyncio.Event()
        self.busy_ns = 0

    @property
    def leader(self) -> Leader:
        """The leader of the latest start, which gets the kernel's decisions."""
        return self.supervisor.worker_group.leader(self.name)

    @property
    def down(self) -> bool:
        """True if its ranks are lost, or not in use yet."""
        return self.supervisor.down

    @property
    def sizing(self) -> bool:
        """True while the KV cache of its new ranks is being sized."""
        return self.down and self.leader.sizing

    @property
    def state(self) -> str:
        """One of `up`, `down`, `draining`, `retired`, as in the kernel's statistics."""
        if self.supervisor.retired is not None:
            return "retired"
        if self.down:
            return "down"
        return "draining" if self.drain_wanted else "up"

    def row(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the operator's view of the group; `figures` are the kernel's statistics of its stage."""
        worker_group, loss = self.supervisor.worker_group, self.supervisor.last_loss
        memory = worker_group.memory().get(self.name, {})
        late, threads = worker_group.kernels_late(self.name), worker_group.threads()
        return {
            "name": self.name,
            "stage": self.stage,
            "state": self.state,
            "ranks": [
                {
                    "rank": rank,
                    "pid": pid,
                    "memory": dict(memory.get(rank, {})),
                    "kernels_late": late.get(rank, 0),
                    "threads": threads[rank].active if rank in threads else None,
                }
                for rank, pid in enumerate(worker_group.pids)
            ],
            **self._work(figures),
            "busy_ms": self.busy_ns / 1e6,
            "heartbeats": worker_group.heartbeats(self.name),
            "restarts": self.supervisor.restarts,
            "losses": dict(self.supervisor.losses),
            "last_loss": _reported(loss) if loss else None,
        }

    def _work(self, figures: Mapping[str, Any]) -> dict[str, int]:
        """Return running and waiting requests, or items of an encode group; waiting items count for the stage."""
        own = figures.get("groups", {}).get(self.name, {})
        if self.stage == "encode":
            waiting = figures.get("waiting_items", 0)
            return {"running": own.get("running_items", 0), "waiting": waiting}
        running = own.get("prefilling", 0) + own.get("decoding", 0)
        return {"running": running, "waiting": own.get("waiting", 0)}


def _reported(loss: LastLoss) -> dict[str, str]:
    """Return the operator's view of a loss."""
    when = dt.datetime.fromtimestamp(loss.at_s, dt.UTC).isoformat()
    return {"kind": type(loss.failure).__name__, "reason": str(loss.failure), "at": when}


class ServedGroups(Mapping[str, ServedGroup]):
    """All groups by name; `handle` passes events to the kernel, and `drain_s` limits the time of each drain."""

    def __init__(
        self, supervisors: Sequence[Supervisor], handle: Callable[[Event], None], *, drain_s: float
    ) -> None:
        self._handle = handle
        self._drain_s = drain_s
        self._groups = {
            name: ServedGroup(name, supervisor)
            for supervisor in supervisors
            for name in supervisor.worker_group.groups
        }

    def __getitem__(self, name: str) -> ServedGroup:
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def of_stage(self, stage: str) -> list[ServedGroup]:
        """Return the groups of a stage, in order."""
        return [group for group in self._groups.values() if group.stage == stage]

    def supervised_by(self, supervisor: Supervisor) -> list[ServedGroup]:
        """Return the groups of a supervisor's worker group."""
        return [group for group in self._groups.values() if group.supervisor is supervisor]

    def all_up(self) -> bool:
        """Return True if every group is up."""
        return all(group.state == "up" for group in self._groups.values())

    def busy_ms(self) -> dict[str, float]:
        """Return the compute time of ranks by stage, and by group if a stage has several."""
        spent: dict[str, float] = {}
        for group in self._groups.values():
            spent[group.stage] = spent.get(group.stage, 0.0) + group.busy_ns / 1e6
            if group.name != group.stage:
                spent[group.name] = group.busy_ns / 1e6
        return spent

    # --- administration ---

    async def drain(self, name: str) -> bool:
        """Give a group no new requests, and wait until it is idle; return True if that happened in time.

        Blocks: up to the deadline for draining; the group continues to drain afterwards.

        Raises:
            RequestRefused: When there is no such group, it is not up, or it is the last of its stage that is up.
        """
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
        """Replace the ranks of a group after it is drained, or after the deadline; return True if it is up again.

        Requests that still run then continue after the restart, as after any loss. A retired group starts again.

        Blocks: up to the deadline for draining, then as long as a worker group may take to restart.

        Raises:
            RequestRefused: When there is no such group, or it is restarting already.
        """
        supervisor = self._known(name).supervisor
        groups = self.supervised_by(supervisor)
        for group in groups:
            self._check_state(group, "restart", "up", "draining", "retired")
        if supervisor.retired:
            for group in groups:
                group.drain_wanted = False
            supervisor.revive()
            await supervisor.wait_settled()
            return all(group.state == "up" for group in groups)
        await self._drain_all(supervisor, groups)
        if supervisor.down or supervisor.retired:
            probe("administration.lost_while_restarting")
        else:
            failure = RestartedByOperator(tuple(group.name for group in groups))
            supervisor.note_restart(failure)
            for group in groups:
                self._handle(GroupLost(group.name, failure, planned=True))
        await supervisor.wait_settled()
        return all(group.state == "up" for group in groups)

    async def _drain_all(self, supervisor: Supervisor, groups: list[ServedGroup]) -> None:
        """Drain all groups of a worker group within the deadline; the encoder last, since running requests need it."""
        supervisor.restarting = True
        try:
            async with asyncio.timeout(self._drain_s):
                for group in sorted(groups, key=lambda one: one.stage == "encode"):
                    self._begin_drain(group)
                    await group.drained.wait()
        except TimeoutError:
            probe("administration.drain_deadline")
            names = [group.name for group in groups]
            logger.warning("%s: not drained in %g s, restarted now", names, self._drain_s)
        except BaseException:
            for group in groups:
                self._end_drain(group)
            raise
        finally:
            supervisor.restarting = False
        for group in groups:
            group.drain_wanted = False  # it takes requests after the restart

    def resume(self, name: str) -> None:
        """Give requests to a drained or draining group again.

        Raises:
            RequestRefused: When there is no such group, or it was not drained.
        """
        group = self._known(name)
        supervisor = group.supervisor
        if not group.drain_wanted or supervisor.restarting or supervisor.retired:
            self._check_state(group, "resume", "draining")
        if not group.drained.is_set():
            probe("administration.resumed_while_draining")
        self._end_drain(group)

    def back(self, group: ServedGroup) -> None:
        """Handle the return of a lost group; a group that is to be drained continues to drain."""
        if group.drain_wanted:
            probe("administration.drain_outlives_loss")
            self._handle(Drain(group.name))

    def _known(self, name: str) -> ServedGroup:
        if name not in self._groups:
            known = ", ".join(self._groups)
            raise RequestRefused(
                f"there is no group {name!r}. Remedy: name one of {known}.", code="unknown_group"
            )
        return self._groups[name]

    def _check_state(self, group: ServedGroup, action: str, *allowed: str) -> None:
        state = "restarting" if group.supervisor.restarting else group.state
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
        if not group.down:
            self._handle(Resume(group.name))


def _refused(what: str, *, code: str, remedy: str) -> RequestRefused:
    return RequestRefused(f"{what}. Remedy: {remedy}.", code=code, status=409)
