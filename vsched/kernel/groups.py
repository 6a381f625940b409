"""Groups of ranks as the kernel sees them: each takes decisions while it is up, and can be lost, drained or retired."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Protocol

from vsched.kernel.snapshot import Restorable, Saved


class Status(enum.StrEnum):
    """What a group can be given."""

    DOWN = "down"
    """Nothing: its ranks are not there, but will be."""
    UP = "up"
    DRAINING = "draining"
    """Nothing new: it finishes what it has."""
    RETIRED = "retired"
    """Nothing, ever again."""


class Group(Restorable):
    """One replica of a stage.

    Attributes:
        name: See `vsched.types.group_names`.
        ready: Whether its ranks are there and can be sent decisions.
        open: Whether it takes new work.
        retired: Whether it is gone for good.
    """

    status: Saved[Status]

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

    def rebuild(self) -> None:
        self.set_status(self.status)

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


class Loaded(Protocol):
    """A group with a load."""

    @property
    def load_tokens(self) -> int: ...
    @property
    def slots_held(self) -> int: ...
    @property
    def open(self) -> bool: ...


class Loads:
    """The loads of all generate groups, each kept until its group changes.

    Who routes, or counts at the front door, reads numbers that lie together, and not every group.

    Attributes:
        tokens: Of each group the tokens of all its requests.
        open: Whether each takes new work.
        tokens_total: The sum of `tokens`; likewise `slots_total` of the slots that requests hold.
    """

    def __init__(self, groups: Sequence[Loaded]) -> None:
        self._groups = groups
        self.tokens = [0] * len(groups)
        self.open = [False] * len(groups)
        self._slots = [0] * len(groups)
        self.tokens_total = self.slots_total = 0
        self._changed = dict.fromkeys(range(len(groups)))

    def change(self, index: int) -> None:
        """A group has changed, or is about to."""
        self._changed[index] = None

    def refresh(self) -> Loads:
        """Look at the groups that have changed since this was last asked; return this."""
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
        """Assert that no change was missed."""
        self.refresh()
        groups = self._groups
        assert self.tokens == [group.load_tokens for group in groups], "a load has changed unseen"
        assert self._slots == [group.slots_held for group in groups], "a slot has changed unseen"
        assert self.open == [group.open for group in groups], "a status has changed unseen"
        totals = sum(self.tokens), sum(self._slots)
        assert totals == (self.tokens_total, self.slots_total), "loads are added up wrongly"
