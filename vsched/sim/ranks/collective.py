"""Where the ranks of a worker group wait for each other: a step that they share goes on when all are there."""

from __future__ import annotations

import asyncio

from vsched.sim.faults.plan import OutOfMemory
from vsched.sim.world import World


class Collective:
    """The meeting place of the ranks that one worker group started together."""

    def __init__(self, world: World, ranks: int) -> None:
        self._world = world
        self._ranks = ranks
        self._missing: set[int] = set(range(ranks))
        self._met: asyncio.Future[None] = world.loop.create_future()
        self._lacking: set[int] | None = None

    async def meet(self, rank: int) -> None:
        """Wait until all ranks are at this step; each comes once before any comes again."""
        self._missing.discard(rank)
        if self._missing:
            await asyncio.shield(self._met)
            return
        self._lacking = None
        self._met.set_result(None)
        self._met = self._world.loop.create_future()
        self._missing = set(range(self._ranks))

    def has_memory(self, rank: int, group: str) -> bool:
        """Return whether all ranks find memory in the step that they have met for: else each of them fails once."""
        if self._lacking is None:
            faults = [
                self._world.injector.take(
                    OutOfMemory, group=group, rank=one, such=lambda fault: fault.during == "step"
                )
                for one in range(self._ranks)
            ]
            found = all(fault is None for fault in faults)
            self._lacking = set() if found else set(range(self._ranks))
        if rank not in self._lacking:
            return True
        self._lacking.discard(rank)
        return False
