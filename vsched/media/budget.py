"""Limits on the host memory of requests in preparation, in bytes.

`ByteBudget` is for decoding and processing, and reserved before a thread starts. An image reserves its whole estimate
at once and releases it when its thread is done. The grant belongs to the image and not to the request: the thread that
holds it needs nothing else to finish, so there is no deadlock, and a request of many images needs no more than its
largest one. Grants are first come, first served: a small image does not overtake a large one, which would starve
otherwise. It runs on the event loop between two awaits, so it needs no lock.

`HeldBytes` counts encoded bytes: references, and data read for them. A `data:` URL counts both encoded and decoded,
before it is decoded. A file counts before it is read, a fetched image while it streams. The bytes of a request are
released once it is prepared or cancelled and no thread reads for it any more: a thread cannot be cancelled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

import msgspec

from vsched.errors import RequestRefused


class BudgetStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a budget: total and used bytes, and the number of waiting images."""

    bytes_total: int
    bytes_used: int
    waiting: int


class _State(Enum):
    WAITING = auto()
    HELD = auto()
    RELEASED = auto()


class Grant:
    """A position in the queue, later bytes of the budget, until `release`."""

    def __init__(self, budget: ByteBudget, size: int, begin: Callable[[Grant], None]) -> None:
        self.size = size
        self.begin = begin
        self.state = _State.WAITING
        self._budget = budget

    def release(self) -> None:
        """Return the bytes, or leave the queue; idempotent."""
        self._budget.release(self)


class ByteBudget:
    """A number of bytes, granted in order of request."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._waiters: deque[Grant] = deque()
        self._is_serving = False

    def ask(self, size: int, begin: Callable[[Grant], None]) -> Grant:
        """Queue for bytes; `begin` is called with the grant once they are reserved, possibly before this returns.

        Order: first come, first served.
        """
        assert 0 <= size <= self._size
        grant = Grant(self, size, begin)
        self._waiters.append(grant)
        self._grant_waiting()
        return grant

    def release(self, grant: Grant) -> None:
        """Release a grant in any state."""
        state, grant.state = grant.state, _State.RELEASED
        if state is _State.HELD:
            self._used -= grant.size
        elif state is _State.WAITING:
            self._waiters.remove(grant)
        else:
            return
        self._grant_waiting()

    def statistics(self) -> BudgetStatistics:
        """Return a snapshot."""
        return BudgetStatistics(
            bytes_total=self._size,
            bytes_used=self._used,
            waiting=len(self._waiters),
        )

    def _grant_waiting(self) -> None:
        if self._is_serving:
            # `begin` may release at once: the outer loop handles it, so calls do not nest.
            return
        self._is_serving = True
        try:
            while self._waiters and self._waiters[0].size <= self._size - self._used:
                grant = self._waiters.popleft()
                grant.state = _State.HELD
                self._used += grant.size
                grant.begin(grant)
        finally:
            self._is_serving = False


class HeldBytes:
    """Total over all requests; used from the event loop and from reader threads."""

    def __init__(self, bytes_max: int) -> None:
        self.lock = threading.Lock()
        self.total = 0
        self.bytes_max = bytes_max


class Holding:
    """Bytes held by one request; owned by the request and by each thread that reads for it."""

    def __init__(self, held: HeldBytes) -> None:
        self.size = 0
        self._owners = 1
        self._held = held

    def add(self, size: int) -> None:
        """Count more bytes, before they are allocated; a single request is limited only by its own limits.

        Raises:
            RequestRefused: If the requests in preparation would hold too many in total.
        """
        held = self._held
        with held.lock:
            total = held.total + size
            if held.total > self.size and total > held.bytes_max:
                raise RequestRefused.of_limit(
                    "the requests being prepared hold too many bytes",
                    value=f"{total} bytes",
                    limit=f"{held.bytes_max} bytes",
                    remedy="try again later or raise media.preparing_bytes_max",
                    code="queue_full",
                    status=429,
                    retry_after_s=1,
                )
            held.total = total
            self.size += size

    def add_owner(self) -> None:
        """Add an owner."""
        with self._held.lock:
            self._owners += 1

    def remove_owner(self) -> None:
        """Remove an owner; the last one releases all bytes."""
        with self._held.lock:
            self._owners -= 1
            assert self._owners >= 0
            if self._owners == 0:
                self._held.total -= self.size
