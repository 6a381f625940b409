"""The requests of a generate group that could run at once, and wait for a slot and blocks."""

from __future__ import annotations

from collections.abc import Callable

from vsched.kernel.request import Phase, RequestState
from vsched.kernel.snapshot import Saved
from vsched.kernel.waiting_queue import OrderedQueue


class ReadyEntry:
    """A waiting request as an admission policy sees it."""

    __slots__ = ("_block_size", "order", "state")

    def __init__(self, state: RequestState, block_size: int) -> None:
        self.state = state
        self.order = state.order
        self._block_size = block_size

    @property
    def tokens(self) -> int:
        """Tokens still to be computed, as far as known."""
        return self.state.uncached

    @property
    def blocks(self) -> int:
        """KV blocks of all its known tokens."""
        return -(-len(self.state.tokens) // self._block_size)

    @property
    def priority(self) -> int:
        """The request's priority."""
        return self.state.request.priority

    @property
    def arrived_ns(self) -> int:
        """When it was submitted."""
        return self.state.submitted_ns

    @property
    def target_ns(self) -> int | None:
        """When its first token is due."""
        return self.state.target_ns

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.state.request.tenant

    def __repr__(self) -> str:
        return f"<request {self.state.number}: {self.tokens} tokens, {self.blocks} blocks>"


class RequestQueue(OrderedQueue[ReadyEntry]):
    """Ready requests, in order of arrival.

    Attributes:
        blocked: Whether the front was found to have no room; nothing joins before something changes.
    """

    blocked: Saved[bool] = False

    def __init__(self, block_size: int, mark_dirty: Callable[[], None]) -> None:
        """Make an empty queue; `mark_dirty` is called when a request may have become able to join."""
        super().__init__()
        self._mark_dirty = mark_dirty
        self._block_size = block_size
        self._by_number: dict[int, ReadyEntry] = {}

    def enqueue(self, state: RequestState) -> None:
        """Let a request wait at its place."""
        state.phase = Phase.READY
        entry = self._by_number[state.number] = ReadyEntry(state, self._block_size)
        self.put_new(entry)
        self.unblock()

    def dequeue(self, state: RequestState) -> None:
        """Take a request out; it must be in."""
        self.remove(self._by_number.pop(state.number))
        self.unblock()

    def may_join(self, now_ns: int) -> bool:
        """Return whether anybody waits whom nothing but the admission policy keeps from joining, as far as is known."""
        return bool(self.entries) and not self.blocked and self.held_until(now_ns) is None

    def unblock(self) -> None:
        """Something has changed: the front may have room."""
        self.blocked = False
        self._mark_dirty()
