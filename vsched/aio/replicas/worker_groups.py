"""All worker groups of a server: they start in parallel, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from vsched.aio.replicas.supervisor import Reports
from vsched.aio.replicas.worker_group import WorkerGroup, first_failure
from vsched.errors import GroupLostError
from vsched.types import stage_of


class WorkerGroups:
    """The worker groups, in order."""

    def __init__(self, worker_groups: Sequence[WorkerGroup]) -> None:
        self._crews = list(worker_groups)
        self._lost = asyncio.Event()
        self._lost_reason = ""

    def __iter__(self) -> Iterator[WorkerGroup]:
        return iter(self._crews)

    async def start(self) -> Reports:
        """Start all worker groups in parallel, wait until they are ready, and return the reports of ranks by group.

        Blocks: up to the deadline for readiness.

        Raises:
            CheckpointError, DeviceOutOfMemory, GroupLostError: When a worker group cannot start; the others stop.
        """
        loop = asyncio.get_running_loop()
        starts = [loop.create_task(worker_group.start()) for worker_group in self._crews]
        lost = loop.create_task(self._lost.wait())
        try:
            # One that fails ends the others: they may be waiting for what it will never tell.
            await first_failure([*starts, lost], until=starts)
        finally:
            for task in (lost, *starts):
                task.cancel()
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(lost, return_exceptions=True)
        errors = [one for one in outcomes if isinstance(one, Exception)]
        if self._lost_reason:
            errors.append(GroupLostError(self._lost_reason))
        if errors:
            await self.stop(grace_s=0)
            raise errors[0]
        reports: Reports = {}
        for outcome in outcomes:
            assert isinstance(outcome, dict)
            reports.update(outcome)
        return reports

    def lose_early(self, reason: str) -> None:
        """A worker group that was ready was lost while others start: that ends the start of all."""
        self._lost_reason = reason
        self._lost.set()

    async def stop(self, *, grace_s: float) -> None:
        """Stop all worker_groups.

        Blocks: at most the grace; then ranks are killed.
        """
        await asyncio.gather(*(worker_group.stop(grace_s=grace_s) for worker_group in self._crews))

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks."""
        return [pid for worker_group in self._crews for pid in worker_group.pids]

    def memory(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return what ranks said of their memory, by group and rank, in bytes."""
        return {
            group: {str(rank): dict(fields) for rank, fields in ranks.items()}
            for worker_group in self._crews
            for group, ranks in worker_group.memory().items()
        }


def smallest_cache(reports: Reports) -> int:
    """Return the KV blocks of the smallest generate group; 0 where there is none among them."""
    sizes = [
        ready.kv_blocks
        for group, ranks in reports.items()
        if stage_of(group) == "generate"
        for ready in ranks
    ]
    return min(sizes, default=0)
