"""The waiting queue of a stage: first come, first served, with put-front built into the order.

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
    """Something with a place in a queue."""

    @property
    def order(self) -> tuple[int, int]: ...


Waiting = TypeVar("Waiting", bound=Ordered)


def order_of(entry: Ordered) -> tuple[int, int]:
    """Return an entry's place in the queue."""
    return entry.order


class OrderedQueue(Generic[Waiting]):
    """Entries sorted by order number; inserting at the back is the common case and cheap.

    Attributes:
        entries: The entries, front first; read only, and the same object for life.
        hold_until_ns: Until when the admission policy holds all of them back; None where it does not.
    """

    def __init__(self) -> None:
        self._entries: list[Waiting] = []
        self.entries: Sequence[Waiting] = self._entries
        self.hold_until_ns: int | None = None

    def held_until(self, now_ns: int) -> int | None:
        """Return until when the entries are still held back; None when they are not."""
        until_ns = self.hold_until_ns
        return until_ns if until_ns is not None and until_ns > now_ns else None

    def put_new(self, entry: Waiting) -> None:
        """Insert an entry that the admission policy has not seen: it may find it worth going now."""
        self.put(entry)
        self.hold_until_ns = None

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
