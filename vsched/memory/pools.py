"""Ranks by the memory that they share.

Two ranks on one device see each other in what is not available; counted rank by rank, each would be a peer of the
other. So everything that is shared is counted once for each pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vsched.policy import RankMemory, Reservation

_UNITS = ((1 << 30, "GiB", 2), (1 << 20, "MiB", 1), (1 << 10, "KiB", 1))


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """One memory and the ranks of the group that share it.

    Attributes:
        unheld_bytes: What encode ranks will need of it and do not hold yet.
    """

    name: str
    ranks: tuple[RankMemory, ...]
    unheld_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What the pool has in all; the ranks should agree, and the smallest counts."""
        return min(rank.total_bytes for rank in self.ranks)

    @property
    def available_bytes(self) -> int:
        """What is free, as the rank saw it that saw the least."""
        return min(rank.available_bytes for rank in self.ranks)

    @property
    def peers_bytes(self) -> int:
        """What processes that are not of this group hold."""
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


def table_text(rows: Sequence[Sequence[str]], align: str) -> str:
    """Draw rows as a table of plain text; `align` has `<` or `>` for each column."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def size_text(size: int) -> str:
    """Word a size for people, in the largest unit that it reaches."""
    for unit, name, digits in _UNITS:
        if abs(size) >= unit:
            return f"{size / unit:.{digits}f} {name}"
    return f"{size} bytes"
