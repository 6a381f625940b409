"""The waiting requests of a generate group."""

from __future__ import annotations

from collections.abc import Callable

from vsched.kernel.request import READY, RequestState
from vsched.policy import WaitingEntry
from vsched.policy_host.snapshot import Saved
from vsched.policy_host.waiting import OrderedQueue
from vsched.types import count_of


class ReadyEntry:
    """A waiting request, and its view for admission policies."""

    __slots__ = ("order", "state", "view")

    def __init__(self, state: RequestState, block_size: int) -> None:
        request = state.request
        self.state = state
        self.order = state.order
        self.view = WaitingEntry(
            tokens=state.uncached,
            blocks=-(-len(state.tokens) // block_size),
            priority=request.priority,
            arrived_ns=state.submitted_ns,
            target_ns=state.target_ns,
            tenant=request.tenant,
            session=request.session,
            images=len(state.items),
            image_tokens=sum([count_of(item.runs) for item in state.items]) if state.items else 0,
            max_tokens=request.sampling.max_tokens,
            outputs=len(state.tokens) - state.prompt_length,
        )


class RequestQueue(OrderedQueue[ReadyEntry]):
    """Ready requests, in order of arrival.

    Attributes:
        blocked: Whether the first request has no room; nothing joins before something changes.
    """

    blocked: Saved[bool] = False

    def __init__(self, block_size: int, mark_dirty: Callable[[], None]) -> None:
        """Create an empty queue; `mark_dirty` is called when a request may have become able to join."""
        super().__init__()
        self._mark_dirty = mark_dirty
        self._block_size = block_size
        self._by_number: dict[int, ReadyEntry] = {}

    def enqueue(self, state: RequestState) -> None:
        """Insert a request at its place."""
        state.phase = READY
        entry = self._by_number[state.number] = ReadyEntry(state, self._block_size)
        self.put_new(entry)
        self.unblock()

    def dequeue(self, state: RequestState, *, chosen_ns: int | None = None) -> None:
        """Remove a request, which joins at `chosen_ns` or leaves; it must be in the queue."""
        self.remove(self._by_number.pop(state.number), chosen_ns=chosen_ns)
        self.unblock()

    def may_join(self, now_ns: int) -> bool:
        """Return True if a waiting request is held back only by the admission policy, as far as known."""
        return bool(self.entries) and not self.blocked and self.held_until(now_ns) is None

    def unblock(self) -> None:
        """Note that the first request may have room."""
        self.blocked = False
        self._mark_dirty()
