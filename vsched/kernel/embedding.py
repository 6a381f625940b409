"""One item's embedding, from the first request that wants it until it leaves the cache."""

from __future__ import annotations

import enum

from vsched.types import MediaItem


class EntryPhase(enum.Enum):
    """The life of an embedding."""

    QUEUED = "queued"
    ENCODING = "encoding"
    READY = "ready"


class EmbeddingEntry:
    """One item's embedding; also what an admission policy sees of it.

    `tainted`: everybody who wanted it left while it was being encoded. Its pixels may have been overwritten meanwhile,
    so the result is thrown away.
    """

    __slots__ = (
        "alone",
        "arrived_ns",
        "attempts",
        "item",
        "order",
        "pages",
        "phase",
        "priority",
        "readers",
        "tainted",
        "users",
    )

    def __init__(
        self, item: MediaItem, order: tuple[int, int], *, now_ns: int, priority: int
    ) -> None:
        self.item = item
        self.order = order
        self.phase = EntryPhase.QUEUED
        self.pages: list[int] = []
        self.users: dict[int, tuple[int, int]] = {}
        self.readers = 0
        self.attempts = 0
        self.alone = False
        self.tainted = False
        self.arrived_ns = now_ns
        self.priority = priority

    @property
    def tokens(self) -> int | None:
        """Encoder output tokens; None (runs alone) once it was part of a batch that failed."""
        return None if self.alone else self.item.tokens

    @property
    def blocks(self) -> int:
        """Items need no KV blocks."""
        return 0

    def __repr__(self) -> str:
        return f"<item {self.item.key.hex()[:8]}: {self.item.tokens} tokens>"
