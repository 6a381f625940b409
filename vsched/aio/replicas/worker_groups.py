"""All crews of a server: they start in parallel, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from vsched.aio.replicas.supervisor import Reports
from vsched.aio.replicas.worker_group import Crew, first_failure
from vsched.errors import GroupLost
from vsched.types import stage_of


class Crews:
    """The crews, in order."""

    def __init__(self, crews: Sequence[Crew]) -> None:
        self._crews = list(crews)
        self._lost = asyncio.Event()
        self._lost_reason = ""

    def __iter__(self) -> Iterator[Crew]:
        return iter(self._crews)

    async def start(self) -> Reports:
        """Start all crews in parallel (E12), wait until they are ready, and return what their ranks report, by group.

        Blocks: up to the deadline for readiness.

        Raises:
            CheckpointError, DeviceOutOfMemory, GroupLost: When a crew cannot start; the others are stopped.
        """
        loop = asyncio.get_running_loop()
        starts = [loop.create_task(crew.start()) for crew in self._crews]
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
            errors.append(GroupLost(self._lost_reason))
        if errors:
            await self.stop(grace_s=0)
            raise errors[0]
        reports: Reports = {}
        for outcome in outcomes:
            assert isinstance(outcome, dict)
            reports.update(outcome)
        return reports

    def lose_early(self, reason: str) -> None:
        """A crew that was ready was lost while others start: that ends the start of all."""
        self._lost_reason = reason
        self._lost.set()

    async def stop(self, *, grace_s: float) -> None:
        """Stop all crews.

        Blocks: at most the grace; then ranks are killed.
        """
        await asyncio.gather(*(crew.stop(grace_s=grace_s) for crew in self._crews))

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks."""
        return [pid for crew in self._crews for pid in crew.pids]

    def memory(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return what ranks said of their memory, by group and rank, in bytes."""
        return {
            group: {str(rank): dict(fields) for rank, fields in ranks.items()}
            for crew in self._crews
            for group, ranks in crew.memory().items()
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
