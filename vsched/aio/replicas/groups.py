"""The groups that a shell serves with: which worker group each belongs to, and how it is."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vsched.aio.leader.leader import Leader
from vsched.aio.replicas.supervisor import LastLoss, Supervisor
from vsched.failures import GroupFailure
from vsched.types import stage_of


class ServedGroup:
    """One replica of a stage.

    Attributes:
        down: Its ranks are not there, or not in use yet.
        drain_wanted: An operator wants it to take nothing new; this outlives a loss.
        leader: Of the ranks that serve now; it takes the kernel's decisions.
        drained: Set once nothing runs there any more.
        retired: Why it will not come back; None while it may.
    """

    def __init__(self, name: str, supervisor: Supervisor) -> None:
        self.name = name
        self.stage = stage_of(name)
        self.supervisor = supervisor
        self.leader: Leader = supervisor.worker_group.leader(name)
        self.down = False
        self.drain_wanted = False
        self.drained = asyncio.Event()
        self.retired: GroupFailure | None = None
        self.busy_ns = 0

    def back(self) -> None:
        """Its ranks are new ones."""
        self.leader = self.supervisor.worker_group.leader(self.name)
        self.down = False

    @property
    def sizing(self) -> bool:
        """Whether the KV cache of its new ranks is being sized."""
        return self.down and self.supervisor.worker_group.leader(self.name).sizing

    @property
    def state(self) -> str:
        """One of `up`, `down`, `draining`, `retired`, as in the kernel's statistics."""
        if self.retired is not None:
            return "retired"
        if self.down:
            return "down"
        return "draining" if self.drain_wanted else "up"

    def row(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return what an operator sees; `figures` are the kernel's numbers of this group's stage."""
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
            "last_loss": _told(loss) if loss else None,
        }

    def _work(self, figures: Mapping[str, Any]) -> dict[str, int]:
        """Return what runs and waits: requests of a generate group, items of an encode group, which share one line."""
        own = figures.get("groups", {}).get(self.name, {})
        if self.stage == "encode":
            waiting = figures.get("waiting_items", 0)
            return {"running": own.get("running_items", 0), "waiting": waiting}
        running = own.get("prefilling", 0) + own.get("decoding", 0)
        return {"running": running, "waiting": own.get("waiting", 0)}


def _told(loss: LastLoss) -> dict[str, str]:
    """Return a loss as an operator sees it."""
    when = dt.datetime.fromtimestamp(loss.at_s, dt.UTC).isoformat()
    return {"kind": type(loss.failure).__name__, "reason": str(loss.failure), "at": when}


class ServedGroups(Mapping[str, ServedGroup]):
    """All groups by name."""

    def __init__(self, supervisors: Sequence[Supervisor]) -> None:
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
        """Return the groups that a supervisor brings back together."""
        return [group for group in self._groups.values() if group.supervisor is supervisor]

    def all_up(self) -> bool:
        """Return whether every group serves."""
        return all(group.state == "up" for group in self._groups.values())

    def busy_ms(self) -> dict[str, float]:
        """Return the time that ranks computed, by stage, and by group where a stage has several."""
        spent: dict[str, float] = {}
        for group in self._groups.values():
            spent[group.stage] = spent.get(group.stage, 0.0) + group.busy_ns / 1e6
            if group.name != group.stage:
                spent[group.name] = group.busy_ns / 1e6
        return spent
