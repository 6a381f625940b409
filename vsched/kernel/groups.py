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

    @property
    def idle(self) -> bool:
        """Whether it has nothing in flight."""
        raise NotImplementedError
