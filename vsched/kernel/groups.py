"""Groups of ranks as the kernel sees them: each takes decisions while it is up, and can be lost, drained or retired."""

from __future__ import annotations

import enum


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
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.status = Status.DOWN

    @property
    def ready(self) -> bool:
        """Whether its ranks are there and can be sent decisions."""
        return self.status in (Status.UP, Status.DRAINING)

    @property
    def open(self) -> bool:
        """Whether it takes new work."""
        return self.status is Status.UP

    @property
    def retired(self) -> bool:
        """Whether it is gone for good."""
        return self.status is Status.RETIRED

    @property
    def idle(self) -> bool:
        """Whether it has nothing under way."""
        raise NotImplementedError
