"""Accounting of encoded bytes that requests in preparation hold: references, and data read for them.

A `data:` URL counts both encoded and decoded, before it is decoded. A file counts before it is read, a fetched image
while it streams. The bytes of a request are released once it is prepared or cancelled and no thread reads for it any
more: a thread cannot be cancelled.
"""

from __future__ import annotations

import threading

from vsched.errors import RequestRefused


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


class HeldBytes:
    """Total over all requests; used from the event loop and from reader threads."""

    def __init__(self, bytes_max: int) -> None:
        self.lock = threading.Lock()
        self.total = 0
        self.bytes_max = bytes_max

    def open(self) -> Holding:
        """Create the account of a new request."""
        return Holding(self)
