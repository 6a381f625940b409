"""The groups of a shell: the worker group and the state of each."""

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
        down: Whether its ranks are lost, or not in use yet.
        drain_wanted: Whether an operator drains it; kept across a loss.
        restarting: Whether an operator restarts it, and it is being drained for that.
        leader: The leader of the current ranks, which gets the kernel's decisions.
        drained: Set when nothing runs in the group.
        retired: Why it will not be restarted; None while it may be.
    """

    def __init__(self, name: str, supervisor: Supervisor) -> None:
        self.name = name
        self.stage = stage_of(name)
        self.supervisor = supervisor
        self.leader: Leader = supervisor.worker_group.leader(name)
        self.down = False
        self.drain_wanted = False
        self.restarting = False
        self.drained = asyncio.Event()
        self.retired: GroupFailure | None = None
        self.busy_ns = 0

    def back(self) -> None:
        """Use the ranks of a restart."""
        self.leader = self.supervisor.worker_group.leader(self.name)
        self.down = False

    @property
    def sizing(self) -> bool:
        """True while the KV cache of its new ranks is being sized."""
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
        """Return running and waiting requests, or items of an encode group; waiting items are those of the stage."""
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
