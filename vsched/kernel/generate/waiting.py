"""The requests of a generate group that could run at once, and wait for a slot and blocks."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.kernel.request import Phase, ReadyEntry, RequestState
from vsched.kernel.waiting_queue import OrderedQueue


class Line:
    """Ready requests, in order of arrival.

    Attributes:
        entries: The requests as admission policies see them, front first; read only.
        blocked: Whether the front was found to have no room; nothing joins before something changes.
        hold_until_ns: Until when the admission policy holds everything back.
    """

    def __init__(self, block_size: int) -> None:
        self.blocked = False
        self.hold_until_ns: int | None = None
        self._block_size = block_size
        self._queue: OrderedQueue[ReadyEntry] = OrderedQueue()
        self.entries: Sequence[ReadyEntry] = self._queue.entries
        self._entries: dict[int, ReadyEntry] = {}

    def put(self, state: RequestState) -> None:
        """Let a request stand in line, at its place."""
        state.phase = Phase.READY
        entry = ReadyEntry(state, self._block_size)
        self._entries[state.number] = entry
        self._queue.put(entry)
        self.blocked = False
        self.hold_until_ns = None  # the policy may find it worth going now

    def remove(self, state: RequestState) -> None:
        """Take a request out; it must stand in line."""
        self._queue.remove(self._entries.pop(state.number))
        self.blocked = False

    def __contains__(self, state: RequestState) -> bool:
        entry = self._entries.get(state.number)
        return entry is not None and entry in self._queue

    def __len__(self) -> int:
        return len(self._queue)


class Load:
    """The tokens of a group's requests, but for those that are being decoded."""

    def __init__(self) -> None:
        self.known_tokens = 0

    def add(self, state: RequestState) -> None:
        """Count a request as one of the group's."""
        state.counted = len(state.tokens)
        self.known_tokens += state.counted

    def drop(self, state: RequestState) -> None:
        """Count it no more."""
        self.known_tokens -= state.counted
        state.counted = 0

    def recount(self, state: RequestState) -> None:
        """Outputs of a life that ended became known tokens."""
        self.drop(state)
        self.add(state)
