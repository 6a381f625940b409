"""All worker groups of a server; the failure of one ends the start of all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, Protocol

from vsched.aio.replicas.supervisor import Reports
from vsched.aio.replicas.worker_group import (
    WorkerGroup,
    WorkerGroupEvents,
    all_or_first_error,
)
from vsched.errors import StartFailedError
from vsched.failures import GroupFailure
from vsched.types import stage_of
from vsched.wire import EncodeResult, GenerateResult

WorkerGroupFactory = Callable[[WorkerGroupEvents], Sequence[WorkerGroup]]


class WorkerGroupListener(Protocol):
    """Receives results and losses of worker groups after all have started."""

    def on_result(self, group: str, result: GenerateResult | EncodeResult) -> None:
        """Handle the result of a step."""
        ...

    def on_lost(self, groups: Sequence[str], failure: GroupFailure) -> None:
        """Handle the loss of a worker group's groups."""
        ...


class WorkerGroups:
    """The worker groups, in order.

    Until there is a listener, they are starting: the loss of a group that was ready ends the start of all.
    """

    def __init__(
        self,
        make: WorkerGroupFactory,
        *,
        on_progress: Callable[[str, str, float], None],
    ) -> None:
        self._listener: WorkerGroupListener | None = None
        self._loss: asyncio.Future[GroupFailure] = asyncio.get_running_loop().create_future()
        events = WorkerGroupEvents(
            on_result=self._on_result, on_lost=self._on_lost, on_progress=on_progress
        )
        self._all = list(make(events))

    def __iter__(self) -> Iterator[WorkerGroup]:
        return iter(self._all)

    def listen(self, listener: WorkerGroupListener) -> None:
        """Report results and losses to `listener` from now on."""
        self._listener = listener

    def _on_result(self, group: str, result: GenerateResult | EncodeResult) -> None:
        if self._listener is not None:
            self._listener.on_result(group, result)

    def _on_lost(self, groups: Sequence[str], failure: GroupFailure) -> None:
        if self._listener is not None:
            self._listener.on_lost(groups, failure)
        elif not self._loss.done():
            self._loss.set_result(failure)

    async def start(self) -> Reports:
        """Start all worker groups in parallel, wait until they are ready, and return the reports of ranks by group.

        Blocks: up to the deadline for readiness.

        Raises:
            CheckpointError, DeviceOutOfMemory, GroupLostError: When a worker group cannot start; the others stop.
        """
        starts = [worker_group.start() for worker_group in self._all]
        try:
            # An error ends all: the others may wait for a report that never comes.
            started = await all_or_first_error(starts, self._raise_loss())
        except Exception:
            await self.stop(grace_s=0)
            raise
        return {group: ready for reports in started for group, ready in reports.items()}

    async def _raise_loss(self) -> NoReturn:
        raise StartFailedError(await asyncio.shield(self._loss))

    async def stop(self, *, grace_s: float) -> None:
        """Stop all worker groups.

        Blocks: at most the grace period; then ranks are killed.
        """
        await asyncio.gather(*(worker_group.stop(grace_s=grace_s) for worker_group in self._all))

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks."""
        return [pid for worker_group in self._all for pid in worker_group.pids]

    def memory(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the ranks' last memory reports by group and rank, in bytes."""
        return {
            group: {str(rank): dict(fields) for rank, fields in ranks.items()}
            for worker_group in self._all
            for group, ranks in worker_group.memory().items()
        }

    def threads(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the number of active and of all compute threads, by group and rank."""
        return {
            group: {
                str(rank): {"active": threads.active, "total": threads.total}
                for rank, threads in worker_group.threads().items()
            }
            for worker_group in self._all
            for group in worker_group.groups
        }


def smallest_cache(reports: Reports) -> int:
    """Return the KV blocks of the smallest generate group; 0 without generate groups."""
    sizes = [
        ready.kv_blocks
        for group, ranks in reports.items()
        if stage_of(group) == "generate"
        for ready in ranks
    ]
    return min(sizes, default=0)
