"""A first-in first-out queue whose entries can be put back at the front."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class QueueStatistics(NamedTuple):
    """A snapshot: entries waiting, consumers waiting, entries not yet marked done."""

    size: int
    waiting_getters: int
    unfinished: int


class FifoQueue(Generic[Item]):
    """Like `asyncio.Queue` without a bound, with `put_front` and `peek`.

    `put_front` returns an entry that was taken and refused: it is the next to be taken again. It does not count as new
    work, so `join` waits for each entry once, however often it was refused.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._unfinished = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def put(self, item: Item) -> None:
        """Add an entry at the back; never waits, as the queue has no bound."""
        self.put_nowait(item)

    def put_nowait(self, item: Item) -> None:
        """Add an entry at the back."""
        self._items.append(item)
        self._unfinished += 1
        self._idle.clear()
        self._wake()

    def put_front(self, item: Item) -> None:
        """Return a taken entry to the front.

        Order: to return several, return the one that was taken last first.

        Raises:
            ValueError: When no taken entry is left to return.
        """
        if self._unfinished <= len(self._items):
            raise ValueError("put_front: every entry is in the queue already, none was taken")
        self._items.appendleft(item)
        self._wake()

    async def get(self) -> Item:
        """Take the front entry.

        Blocks: until there is one.
        """
        while not self._items:
            getter = asyncio.get_running_loop().create_future()
            self._getters.append(getter)
            try:
                await getter
            except asyncio.CancelledError:
                if getter.cancelled():
                    with contextlib.suppress(ValueError):  # an entry that came meanwhile skipped it
                        self._getters.remove(getter)
                elif self._items:
                    self._wake()  # the wake-up was ours; somebody else must take the entry
                raise
        return self._items.popleft()

    def get_nowait(self) -> Item:
        """Take the front entry.

        Raises:
            asyncio.QueueEmpty: When there is none.
        """
        if not self._items:
            raise asyncio.QueueEmpty
        return self._items.popleft()

    def peek(self) -> Item:
        """Return the front entry without taking it.

        Raises:
            asyncio.QueueEmpty: When there is none.
        """
        if not self._items:
            raise asyncio.QueueEmpty
        return self._items[0]

    def task_done(self) -> None:
        """Mark a taken entry as done.

        Raises:
            ValueError: When called more often than entries were put.
        """
        if self._unfinished <= 0:
            raise ValueError("task_done: called more often than entries were put")
        self._unfinished -= 1
        if self._unfinished == 0:
            self._idle.set()

    async def join(self) -> None:
        """Wait until every entry ever put is done.

        Blocks: without limit; wrap it in `asyncio.timeout`.
        """
        await self._idle.wait()

    def qsize(self) -> int:
        """Return the number of entries waiting."""
        return len(self._items)

    def statistics(self) -> QueueStatistics:
        """Return a snapshot."""
        return QueueStatistics(len(self._items), len(self._getters), self._unfinished)

    def _wake(self) -> None:
        while self._getters:
            getter = self._getters.popleft()
            if not getter.done():
                getter.set_result(None)
                return
