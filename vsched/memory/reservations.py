"""What encode ranks reserve, and which of them have not published it yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vsched.errors import limit_message
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

    def of_group(self, group: str) -> list[Reservation]:
        """Return those of one group, by rank; none for a group that does not encode.

        The caller has checked that none is missing: a missing one is an error, and never 0 bytes.
        """
        return [self._published[group, rank] for rank in range(self._ranks_of.get(group, 0))]

    def overdue(self) -> str:
        """Return the message that names the missing ranks, and the remedy; empty when none is missing."""
        missing, ranks = self.missing(), len(self._expected())
        if not missing:
            return ""
        return limit_message(
            "the KV cache cannot be sized before every encode rank has published what it reserves: "
            f"{', '.join(missing)} did not",
            value=f"{ranks - len(missing)} of {ranks} reservations",
            limit="all of them, within deadlines.ready_s",
            remedy="look for the reason in the log of the encode group, raise deadlines.ready_s, "
            "or give its size with encode.reserved, which skips the probe",
        )

    def _expected(self) -> Sequence[tuple[str, int]]:
        return [(group, rank) for group, ranks in self._ranks_of.items() for rank in range(ranks)]

    def _has(self, group: str, rank: int) -> bool:
        return (group, rank) in self._published
