"""Memory shared by processes: ranks by pool, reservations of encoders, shares of a host's memory.

Each of two ranks on one device sees the memory of the other as not available; counted rank by rank, each would be a
peer of the other. So shared memory is counted once for each pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vsched.policy import RankMemory, Reservation

_UNITS = ((1 << 30, "GiB", 2), (1 << 20, "MiB", 1), (1 << 10, "KiB", 1))


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """One memory and the ranks of the group that share it.

    Attributes:
        unheld_bytes: Memory that encode ranks will need of it and do not hold yet.
    """

    name: str
    ranks: tuple[RankMemory, ...]
    unheld_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Size of the pool; the ranks should agree, and the smallest counts."""
        return min(rank.total_bytes for rank in self.ranks)

    @property
    def available_bytes(self) -> int:
        """Free memory, as measured by the rank that saw the least."""
        return min(rank.available_bytes for rank in self.ranks)

    @property
    def peers_bytes(self) -> int:
        """Memory held by processes that are not of this group."""
        own_bytes = sum(rank.reserved_bytes for rank in self.ranks)
        return max(self.total_bytes - self.available_bytes - own_bytes, 0)


def group_pools(ranks: Sequence[RankMemory], reservations: Sequence[Reservation]) -> list[Pool]:
    """Group ranks by pool, in the order of their first rank."""
    names = list(dict.fromkeys(rank.pool for rank in ranks))
    return [
        Pool(
            name=name,
            ranks=tuple(rank for rank in ranks if rank.pool == name),
            unheld_bytes=sum(
                reservation.growth_bytes
                for reservation in reservations
                if reservation.pool == name and not reservation.held
            ),
        )
        for name in names
    ]


def on_host(pool: str) -> bool:
    """Whether a pool is the host's memory, or a limit on a process in it."""
    return pool == "cpu" or pool.startswith("cpu limit of ")


class HostShares:
    """Limits of the pools of a host, chosen so that all pools can reach them at the same time.

    A rank on a CPU measures its own limit, which ignores the limits of others: together they may be more than the host
    has. So the memory that is free when all have loaded, without the `kept_bytes` of others, is divided equally. A
    limit below the share stays as it is. Ranks on other devices are not limited.
    """

    def __init__(
        self, ranks: Sequence[RankMemory], free_bytes: int, *, kept_bytes: int = 0
    ) -> None:
        hosted = [rank for rank in ranks if on_host(rank.pool)]
        self._free_bytes, self._kept_bytes = free_bytes, kept_bytes
        self._share_bytes = max(free_bytes - kept_bytes, 0) // max(len(hosted), 1)
        self._totals: dict[str, int] = {}
        for rank in hosted:
            grown_bytes = rank.reserved_bytes + self._share_bytes
            self._totals[rank.pool] = self._totals.get(rank.pool, 0) + grown_bytes
        self._limited = [rank.name for rank in hosted if self._totals[rank.pool] < rank.total_bytes]

    def within(self, ranks: Sequence[RankMemory]) -> list[RankMemory]:
        """Return measurements of all ranks as if their memories were no larger than their shares."""
        return [self._within(rank, ranks) for rank in ranks]

    def _within(self, rank: RankMemory, ranks: Sequence[RankMemory]) -> RankMemory:
        total_bytes = self._totals.get(rank.pool, rank.total_bytes)
        if total_bytes >= rank.total_bytes:
            return rank
        held_bytes = sum(one.reserved_bytes for one in ranks if one.pool == rank.pool)
        left_bytes = max(total_bytes - held_bytes, 0)
        return msgspec.structs.replace(
            rank,
            total_bytes=total_bytes,
            available_bytes=min(rank.available_bytes, left_bytes),
        )

    def note(self) -> str:
        """Return a sentence for an error message if a share is less than a limit; otherwise nothing."""
        if not self._limited:
            return ""
        return (
            f" The host has {size_text(self._free_bytes)} free, and keeps {size_text(self._kept_bytes)} for images, "
            f"encoders and swapped blocks: {', '.join(self._limited)} may take {size_text(self._share_bytes)} each."
        )


def size_text(size: int) -> str:
    """Format a size for people, in the largest unit that it reaches."""
    for unit, name, digits in _UNITS:
        if abs(size) >= unit:
            return f"{size / unit:.{digits}f} {name}"
    return f"{size} bytes"
