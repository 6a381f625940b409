"""The waiting line of a stage: first come, first served, with put-front built into the order.

An entry keeps its order number for life. A request that is preempted or recovered comes back with its old number, so
it stands before everything that arrived after it, and several of them stand in their original order. "Put front" is
therefore not a second operation that callers could forget or misorder, and a policy that refuses an entry changes
nothing: it was never taken out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Ordered(Protocol):
    """Something with a place in line."""

    @property
    def order(self) -> tuple[int, int]: ...


Waiting = TypeVar("Waiting", bound=Ordered)


def order_of(entry: Ordered) -> tuple[int, int]:
    """Return an entry's place in line."""
    return entry.order


class OrderedQueue(Generic[Waiting]):
    """Entries sorted by order number; inserting at the back is the common case and cheap.

    Attributes:
        entries: The entries, front first; read only, and the same object for life.
    """

    def __init__(self) -> None:
        self._entries: list[Waiting] = []
        self.entries: Sequence[Waiting] = self._entries

    def put(self, entry: Waiting) -> None:
        """Insert an entry at its place."""
        if not self._entries or self._entries[-1].order < entry.order:
            self._entries.append(entry)
        else:
            insort(self._entries, entry, key=order_of)

    def remove(self, entry: Waiting) -> None:
        """Take an entry out; it must be in."""
        index = bisect_left(self._entries, entry.order, key=order_of)
        assert self._entries[index] is entry, "the queue's order was broken"
        del self._entries[index]

    def __contains__(self, entry: Waiting) -> bool:
        index = bisect_left(self._entries, entry.order, key=order_of)
        return index < len(self._entries) and self._entries[index] is entry

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
