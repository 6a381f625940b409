"""Requests that were accepted and are not with the kernel yet: their images and prompts are being prepared.

The kernel hears of a request once its tokens are known. Until then a request belongs to no group, and the task that
prepares it is all there is of it. So it is counted and interrupted here, with the one terminal reply of a request that
waits in the kernel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from vsched.errors import VschedError

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Preparation:
    request_id: str
    task: asyncio.Task[object]
    failure: VschedError | None = None


class Preparations:
    """The preparations that are under way, oldest first."""

    def __init__(self) -> None:
        self._live: dict[_Preparation, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    async def run(self, request_id: str, work: Awaitable[T]) -> T:
        """Return what the preparation of a request comes to; in the caller's task, which can be cancelled as ever.

        Blocks: as long as the work does.

        Raises:
            RequestFailed: When it was interrupted.
        """
        task = asyncio.current_task()
        assert task is not None
        preparation = _Preparation(request_id, task)
        cancelling = task.cancelling()
        self._live[preparation] = None
        self._idle.clear()
        try:
            return await work
        except asyncio.CancelledError:
            # The caller may have been cancelled as well, by its client: then that goes on.
            if preparation.failure is None or task.uncancel() > cancelling:
                raise
            raise preparation.failure from None
        finally:
            self._leave(preparation)

    def interrupt(self, failure: VschedError) -> None:
        """End all that is under way with this failure; none of it counts any more when this returns."""
        for preparation in list(self._live):
            preparation.failure = failure
            # It is cancelled in its next step, even if what it waits for is there by now.
            preparation.task.cancel()
            self._leave(preparation)

    def request_ids(self) -> list[str]:
        """Return the ids of the requests, oldest first."""
        return [preparation.request_id for preparation in self._live]

    async def wait_idle(self) -> None:
        """Wait until nothing is under way.

        Blocks: without limit; wrap it in `asyncio.timeout`.
        """
        await self._idle.wait()

    def _leave(self, preparation: _Preparation) -> None:
        self._live.pop(preparation, None)
        if not self._live:
            self._idle.set()
