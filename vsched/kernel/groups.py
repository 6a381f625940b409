"""Groups of ranks as the kernel sees them: each takes decisions while it is up, and can be lost, drained or retired."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from heapq import heappop, heappush


class Status(enum.StrEnum):
    """What a group can be given."""

    DOWN = "down"
    """Nothing: its ranks are not there, but will be."""
    UP = "up"
    DRAINING = "draining"
    """Nothing new: it finishes what it has."""
    RETIRED = "retired"
    """Nothing, ever again."""


class Group:
    """One replica of a stage.

    Attributes:
        name: See `vsched.types.group_names`.
        ready: Whether its ranks are there and can be sent decisions.
        open: Whether it takes new work.
        retired: Whether it is gone for good.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.set_status(Status.DOWN)

    def set_status(self, status: Status) -> None:
        """Change what the group can be given; what every step asks for is worked out here."""
        self.status = status
        self.ready = status in (Status.UP, Status.DRAINING)
        self.open = status is Status.UP
        self.retired = status is Status.RETIRED
        self.look()

    def look(self) -> None:
        """Something has changed after which it may have a step to plan."""

    @property
    def idle(self) -> bool:
        """Whether it has nothing in flight."""
        raise NotImplementedError


class PlanMarks:
    """Which groups need a look: something has changed after which they may have a step to plan.

    A group that is not marked would plan nothing, so nobody asks it: an event costs what it changes, however many
    groups there are.
    """

    def __init__(self, count: int) -> None:
        """Mark none of `count` groups."""
        self._marked = [False] * count
        self._indices: list[int] = []

    def mark(self, index: int) -> None:
        """Let a group be looked at, in its turn."""
        if not self._marked[index]:
            self._marked[index] = True
            heappush(self._indices, index)

    def walk(self) -> Iterator[int]:
        """Yield the marked groups in their order, and take their marks.

        One that is marked meanwhile has its turn if that is still to come, and else keeps its mark for the next walk.
        """
        indices, marked, at = self._indices, self._marked, -1
        later: list[int] = []
        while indices:
            index = heappop(indices)
            if index <= at:
                later.append(index)
                continue
            at = index
            marked[index] = False
            yield index
        for index in later:
            heappush(indices, index)

    def __contains__(self, index: int) -> bool:
        return self._marked[index]
