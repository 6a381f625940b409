"""Base class of encode and generate groups; marks of all generate groups."""

from __future__ import annotations

import enum
from bisect import bisect_right, insort
from collections.abc import Iterator

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
