"""Base class of encode and generate groups; marks and loads of all generate groups."""

from __future__ import annotations

import enum
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import Protocol

from vsched.policy_host.snapshot import Restorable, Saved


class Status(enum.StrEnum):
    """The state of a group."""

    DOWN = "down"
    """Its ranks are not ready yet, or are being restarted."""
    UP = "up"
    DRAINING = "draining"
    """It finishes its work, and takes no more."""
    RETIRED = "retired"
    """It was lost, and is not restarted."""


_REASONS = {
    Status.DOWN: (
        "its ranks start, or restart after a loss",
        "nothing, if it is back soon; another replica serves meanwhile",
    ),
    Status.DRAINING: ("it takes no more work", "to resume it, with POST /admin/replicas"),
    Status.RETIRED: ("it was lost too often", "to restart the server; its log has the reason"),
}


def unready_reason(name: str, status: Status, more: str = "") -> str:
    """Return why a group that is not up takes no work, with `more` in the same sentence, and a remedy."""
    reason, remedy = _REASONS[status]
    return f"{name} is {status}: {reason}{more}. Remedy: {remedy}"


class Group(Restorable):
    """One replica of a stage.

    Attributes:
        name: See `vsched.types.group_names`.
        ready: Whether decisions can be sent to its ranks.
        open: Whether it takes new work.
        retired: Whether it is gone for good.
    """

    status: Saved[Status]

    def __init__(self, name: str) -> None:
        self.name = name
        self.set_status(Status.DOWN)

    def set_status(self, status: Status) -> None:
        """Change the status, and the flags that follow from it."""
        self.status = status
        self.ready = status in (Status.UP, Status.DRAINING)
        self.open = status is Status.UP
        self.retired = status is Status.RETIRED
        self.mark_dirty()

    def mark_dirty(self) -> None:
        """Note that it may have a step to plan."""

    def rebuild(self) -> None:
        self.set_status(self.status)

    @property
    def idle(self) -> bool:
        """Whether it has no work in flight."""
        raise NotImplementedError


class DirtyGroups:
    """The generate groups that may have a step to plan.

    Any other group would plan nothing and is skipped, so the cost of an event does not grow with the number of groups.

    Attributes:
        changed: The groups whose loads `Loads` has yet to read again.
    """

    def __init__(self, count: int) -> None:
        """Start with all of `count` groups unmarked."""
        self._marked: list[int] = []  # sorted
        self.changed = dict.fromkeys(range(count))

    def mark(self, index: int) -> None:
        """Add a group."""
        self.changed[index] = None
        if index not in self._marked:
            insort(self._marked, index)

    def walk(self) -> Iterator[int]:
        """Remove and yield the marked groups in order.

        A group that is marked meanwhile is yielded, too, if it comes later in the order; else it waits for the next
        walk.
        """
        marked, at = self._marked, -1
        while (place := bisect_right(marked, at)) < len(marked):
            at = marked.pop(place)
            yield at

    def __contains__(self, index: int) -> bool:
        return index in self._marked


class LoadedGroup(Protocol):
    """A generate group, as `Loads` needs it."""

    @property
    def load_tokens(self) -> int: ...
    @property
    def slots_held(self) -> int: ...
    @property
    def open(self) -> bool: ...


class Loads:
    """A cache of the loads of all generate groups, by index.

    Routing and the arrival policy read them for every request; asking each of 64 groups makes an arrival 50 % slower.

    Attributes:
        tokens: Tokens of all requests of each group.
        open: Whether each group takes new work.
        tokens_total: The sum of `tokens`.
        slots_total: The number of slots that requests hold.
    """

    def __init__(self, groups: Sequence[LoadedGroup], dirty: DirtyGroups) -> None:
        self._groups = groups
        self.tokens = [0] * len(groups)
        self.open = [False] * len(groups)
        self._slots = [0] * len(groups)
        self.tokens_total = self.slots_total = 0
        self._changed = dirty.changed

    def change(self, index: int) -> None:
        """Invalidate the numbers of a group, which has changed or is about to."""
        self._changed[index] = None

    def refresh(self) -> Loads:
        """Update the groups that have changed since the last call; return `self`."""
        for index in self._changed:
            group = self._groups[index]
            tokens, slots = group.load_tokens, group.slots_held
            self.tokens_total += tokens - self.tokens[index]
            self.slots_total += slots - self._slots[index]
            self.tokens[index], self._slots[index] = tokens, slots
            self.open[index] = group.open
        self._changed.clear()
        return self

    def check(self) -> None:
        """Assert that all numbers are up to date."""
        self.refresh()
        groups = self._groups
        assert self.tokens == [group.load_tokens for group in groups], (
            "a load has changed unnoticed"
        )
        assert self._slots == [group.slots_held for group in groups], "a slot has changed unnoticed"
        assert self.open == [group.open for group in groups], "a status has changed unnoticed"
        totals = sum(self.tokens), sum(self._slots)
        assert totals == (self.tokens_total, self.slots_total), "the totals of the loads are wrong"
