"""The waiting queue of a stage, in order of arrival.

An entry keeps its order number. A request that is preempted or recovered returns with its old number, so it is ahead of
all later arrivals, and several of them are in their original order. So there is no operation to put an entry at the
front, which callers could forget or misorder. Entries that a policy does not admit stay in the queue. Rejected: taking
an entry out and putting it back if it does not fit, since an exception in between loses it or counts it twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from vsched.policy import Admission, AdmissionView, WaitingEntry
from vsched.policy.checks import PASSED_OVER, put_first
from vsched.policy_host.seats import PolicySeat
from vsched.policy_host.snapshot import Restorable, Saved


class Ordered(Protocol):
    """An entry with a place in a queue, its time of arrival, and its view for admission policies."""

    @property
    def arrived_ns(self) -> int: ...
    @property
    def order(self) -> tuple[int, int]: ...
    @property
    def view(self) -> WaitingEntry: ...


_order = attrgetter("order")

Waiting = TypeVar("Waiting", bound=Ordered)


class OrderedQueue(Restorable, Generic[Waiting]):
    """Entries sorted by order number; appending is the common case, and cheap.

    Attributes:
        entries: The entries in order, read only; always the same object.
        passed_longest_ns: The longest time that an entry was passed over, or kept waiting by an empty answer.
        hold_until_ns: End of a hold of the admission policy on all entries; None without one.
    """

    hold_until_ns: Saved[int | None] = None
    passed_longest_ns: Saved[int] = 0
    _passed: Saved[dict[tuple[int, int], int]]

    def __init__(self) -> None:
        self._entries: list[Waiting] = []
        self._views: list[WaitingEntry] = []
        self._passed = {}  # by order number, the times since which policies keep entries waiting, in order of time
        self.entries: Sequence[Waiting] = self._entries

    def shown(self) -> tuple[WaitingEntry, ...]:
        """Return the views of the entries, as a tuple, which policies cannot change."""
        return tuple(self._views)

    def held_until(self, now_ns: int) -> int | None:
        """Return the end of the current hold; None without one."""
        until_ns = self.hold_until_ns
        return until_ns if until_ns is not None and until_ns > now_ns else None

    def admit(
        self,
        seat: PolicySeat,
        view: AdmissionView,
        waiting: Sequence[Waiting],
        *,
        fits: bool,
    ) -> tuple[Admission, bool]:
        """Call the admission policy, and note its hold.

        `waiting` are the entries of the view. `fits` is True if there are blocks for the first: an answer without
        entries passes it over, too.

        Returns:
            The entries to admit, in order; and whether the overdue one was put first.
        """
        free, overdue, now_ns = view.entries_free, view.overdue, view.now_ns
        admission: Admission = seat.decide(
            view, waiting, free, view.running, now_ns, view.hold_max_ns, view.eligible
        )
        until_ns = admission.hold_until_ns
        self.hold_until_ns = until_ns and seat.lengthen_hold(until_ns, now_ns)
        indices = admission.indices
        if len(indices) > free + len(admission.preempt):
            seat.overrule("more entries than can join")
        if not indices and fits and free and admission.hold_until_ns is None:
            self._passed.setdefault(waiting[0].order, now_ns)
        if overdue is None or (ordered := put_first(indices, overdue)) is indices:
            return admission, False
        seat.overrule(PASSED_OVER)
        return Admission(ordered), True

    def put_new(self, entry: Waiting) -> None:
        """Insert a new entry, and end the hold, since the policy may admit it at once."""
        self.put(entry)
        self.hold_until_ns = None

    def put(self, entry: Waiting) -> None:
        """Insert an entry at its place."""
        entries, order = self._entries, entry.order
        index = len(entries)
        if entries and entries[-1].order > order:
            index = self.ahead_of(order)
        entries.insert(index, entry)
        self._views.insert(index, entry.view)

    def remove(self, entry: Waiting, *, chosen_ns: int | None = None) -> None:
        """Remove an entry; it must be in the queue. If a policy chose it, those ahead of it are passed over."""
        index = self.ahead_of(entry.order)
        assert self._entries[index] is entry, "the queue's order was broken"
        if chosen_ns is not None:
            for other in self._entries[:index]:
                self._passed.setdefault(other.order, chosen_ns)
        self._passed.pop(entry.order, None)
        del self._entries[index], self._views[index]

    def ahead_of(self, order: tuple[int, int]) -> int:
        """Return the number of entries ahead of an order number."""
        return bisect_left(self._entries, order, key=_order)

    def overdue(self, now_ns: int, most_ns: int) -> int | None:
        """Return the index of the entry that was passed over longest, if for more than `most_ns`."""
        if not self._passed:
            return None
        order, since_ns = next(iter(self._passed.items()))
        self.passed_longest_ns = max(self.passed_longest_ns, now_ns - since_ns)
        return self.ahead_of(order) if since_ns + most_ns <= now_ns else None

    def renew_view(self, entry: Waiting) -> None:
        """Update the view of an entry."""
        self._views[self.ahead_of(entry.order)] = entry.view

    def __contains__(self, entry: Waiting) -> bool:
        index = self.ahead_of(entry.order)
        return index < len(self._entries) and self._entries[index] is entry

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Holds:
    """The ends of holds of all queues; its cost grows with the number of holds, not of queues."""

    def __init__(self, queues: Sequence[OrderedQueue[Any]]) -> None:
        self._queues = queues
        self._ends: dict[int, int] = {}

    def note_hold(self, index: int, now_ns: int) -> None:
        """Note the hold of a queue, if any, after its policy may have been called."""
        until_ns = self._queues[index].hold_until_ns
        if until_ns is not None and until_ns > now_ns:
            self._ends[index] = until_ns

    def take_ended(self, now_ns: int) -> list[int]:
        """Return the queues whose holds have ended since the last call."""
        if not self._ends:
            return []
        ended = [index for index, until_ns in self._ends.items() if until_ns <= now_ns]
        for index in ended:
            del self._ends[index]
        return ended

    def first_end(self) -> int | None:
        """Return the end of the first hold; None without one. A new entry may have ended a noted hold."""
        if not self._ends:
            return None
        queues = self._queues
        held = [end for index, end in self._ends.items() if queues[index].hold_until_ns == end]
        return min(held, default=None)
