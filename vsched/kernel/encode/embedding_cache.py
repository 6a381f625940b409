"""One item's embedding, from the first request that wants it until it leaves the cache."""

from __future__ import annotations

import enum

from vsched.kernel.request import RequestState


class EntryPhase(enum.Enum):
    """The life of an embedding."""

    QUEUED = "queued"
    ENCODING = "encoding"
    READY = "ready"


class EmbeddingEntry:
    """One item's embedding; also what an admission policy sees of it.

    `tainted`: everybody who wanted it left while it was being encoded. Its pixels may have been overwritten meanwhile,
    so the result is thrown away. `cohort`: it is encoded again together with those of the same number and nobody else,
    because a batch that it was in failed; 0 for none.
    """

    __slots__ = (
        "arrived_ns",
        "attempts",
        "cohort",
        "item",
        "order",
        "pages",
        "phase",
        "priority",
        "readers",
        "tainted",
        "target_ns",
        "users",
    )

    def __init__(self, state: RequestState, index: int, now_ns: int) -> None:
        self.item = state.items[index]
        self.order = (state.number, index)
        self.phase = EntryPhase.QUEUED
        self.pages: list[int] = []
        self.users: dict[int, tuple[int, int]] = {state.number: self.order}
        self.readers = 0
        self.attempts = 0
        self.cohort = 0
        self.tainted = False
        self.arrived_ns = now_ns
        self.priority = state.request.priority
        self.target_ns = state.target_ns

    def heed(self, state: RequestState) -> None:
        """Be as urgent as the most urgent of those who want it."""
        self.priority = max(self.priority, state.request.priority)
        targets = [one for one in (self.target_ns, state.target_ns) if one is not None]
        self.target_ns = min(targets, default=None)

    @property
    def tokens(self) -> int | None:
        """Tokens that the encoder computes: none for an embedding that the client brought.

        None once it was part of a batch that failed: no policy decides what it runs with.
        """
        if self.cohort:
            return None
        return 0 if self.item.encoded else self.item.tokens

    @property
    def blocks(self) -> int:
        """Items need no KV blocks."""
        return 0

    def __repr__(self) -> str:
        return f"<item {self.item.key.hex()[:8]}: {self.item.tokens} tokens>"
