"""What encode ranks reserve, and who has not said so yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vsched.errors import GroupLost, limit_message
from vsched.policy import Reservation


class Reservations:
    """The reservations of every encode group: complete, or not to be read at all.

    A rank that skips the probe publishes 0 bytes. One that has published nothing is missing, which is not 0.
    """

    def __init__(self, ranks_of: Mapping[str, int]) -> None:
        self._ranks_of = dict(ranks_of)
        self._published: dict[tuple[str, int], Reservation] = {}

    def publish(self, group: str, reservation: Reservation) -> None:
        """Take the reservation of one rank; what it said before a restart is forgotten."""
        ranks = self._ranks_of[group]
        assert 0 <= reservation.rank < ranks, f"{group} has {ranks} ranks: {reservation}"
        self._published[group, reservation.rank] = reservation

    def missing(self) -> list[str]:
        """Name the ranks that have not published."""
        return [
            f"{group} rank {rank}" for group, rank in self._expected() if not self._has(group, rank)
        ]

    def complete(self) -> list[Reservation]:
        """Return all of them, by group and rank.

        Raises:
            GroupLost: When one is missing.
        """
        if self.missing():
            raise self.overdue(waited_s=0)
        return [self._published[key] for key in self._expected()]

    def growth_by_pool(self) -> dict[str, int]:
        """Return the bytes reserved in each pool, held or not.

        Raises:
            GroupLost: When one is missing.
        """
        growth: dict[str, int] = {}
        for reservation in self.complete():
            growth[reservation.pool] = growth.get(reservation.pool, 0) + reservation.growth_bytes
        return growth

    def overdue(self, *, waited_s: float) -> GroupLost:
        """Word the failure of those that did not publish in time."""
        missing, ranks = self.missing(), len(self._expected())
        return GroupLost(
            limit_message(
                "the KV cache cannot be sized before every encode rank has published what it reserves: "
                f"{', '.join(missing)} did not within {waited_s:g} s",
                value=f"{ranks - len(missing)} of {ranks} reservations",
                limit="all of them, within deadlines.ready_s",
                remedy="look for the reason in the log of the encode group, raise deadlines.ready_s, "
                "or give its size with encode.reserved, which skips the probe",
            )
        )

    def _expected(self) -> Sequence[tuple[str, int]]:
        return [(group, rank) for group, ranks in self._ranks_of.items() for rank in range(ranks)]

    def _has(self, group: str, rank: int) -> bool:
        return (group, rank) in self._published
