"""What the requests in preparation hold in encoded bytes: their references, and what was read for them.

A `data:` URL counts as it came and as it is decoded, before it is decoded. A file counts before it is read, a fetched
image while it streams. The bytes of a request are given back when it is prepared or given up, and no thread reads for
it any more: a thread cannot be cancelled.
"""

from __future__ import annotations

import threading

from vsched.errors import RequestRefused, limit_message


class Holding:
    """What one request holds; owned by the request and by each thread that reads for it."""

    def __init__(self, held: HeldBytes) -> None:
        self.size = 0
        self._owners = 1
        self._held = held

    def add(self, size: int) -> None:
        """Count more bytes, before there are any.

        Raises:
            RequestRefused: When the requests in preparation would hold too many together.
        """
        self._held.add(self, size)

    def share(self) -> None:
        """Add an owner."""
        with self._held.lock:
            self._owners += 1

    def drop(self) -> None:
        """Take an owner away; the last one gives everything back."""
        with self._held.lock:
            self._owners -= 1
            assert self._owners >= 0
            if self._owners == 0:
                self._held.total -= self.size


class HeldBytes:
    """The sum over all requests; called from the event loop and from the threads that read."""

    def __init__(self, bytes_max: int) -> None:
        self.lock = threading.Lock()
        self.total = 0
        self._bytes_max = bytes_max

    def open(self) -> Holding:
        """Return a new request's account."""
        return Holding(self)

    def add(self, holding: Holding, size: int) -> None:
        """Count bytes for a request; a request that is alone is bounded by its own limits.

        Raises:
            RequestRefused: When the requests in preparation would hold too many together.
        """
        with self.lock:
            total = self.total + size
            if self.total > holding.size and total > self._bytes_max:
                message = limit_message(
                    "the requests being prepared hold too many bytes",
                    value=f"{total} bytes",
                    limit=f"{self._bytes_max} bytes",
                    remedy="try again later or raise media.preparing_bytes_max",
                )
                raise RequestRefused(message, code="queue_full", status=429, retry_after_s=1)
            self.total = total
            holding.size += size
