"""Shares in the memory of a host that the ranks of several groups take from, each under a limit of its own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vsched.memory.pools import size_text
from vsched.policy import RankMemory


def on_host(pool: str) -> bool:
    """Whether a pool is the host's memory, or a limit on a process in it."""
    return pool == "cpu" or pool.startswith("cpu limit of ")


class HostShares:
    """What each pool of the host may grow to, so that all of them can at a time.

    A rank on a CPU measures its own limit, which says nothing of the limits of others: together they may be more than
    the host has. So what is free when all have loaded, without what is `kept_bytes` for others, is shared out equally.
    A limit that is below the share stays what it is. Ranks elsewhere are not concerned.
    """

    def __init__(
        self, ranks: Sequence[RankMemory], free_bytes: int, *, kept_bytes: int = 0
    ) -> None:
        hosted = [rank for rank in ranks if on_host(rank.pool)]
        self._free_bytes, self._kept_bytes = free_bytes, kept_bytes
        self._share_bytes = max(free_bytes - kept_bytes, 0) // max(len(hosted), 1)
        self._totals: dict[str, int] = {}
        self._sharing: list[str] = []
        for rank in hosted:
            grown_bytes = rank.reserved_bytes + self._share_bytes
            self._totals[rank.pool] = self._totals.get(rank.pool, 0) + grown_bytes
        for rank in hosted:
            if self._totals[rank.pool] < rank.total_bytes:
                self._sharing.append(rank.name)

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
        """Return a sentence for an error message, where a share is less than a limit; else nothing."""
        if not self._sharing:
            return ""
        return (
            f" The host has {size_text(self._free_bytes)} free, and keeps {size_text(self._kept_bytes)} for images, "
            f"encoders and swapped blocks: {', '.join(self._sharing)} may take {size_text(self._share_bytes)} each."
        )
