"""Interface of a leader's links to its ranks."""

from __future__ import annotations

from typing import Protocol

from vsched.wire import LogEntry


class LeaderEnd(Protocol):
    """The leader's end of the links to the ranks of one group; see `vsched.transport.zmq_link.LeaderLink`."""

    def carry(self, entry: LogEntry) -> None:
        """Prepare for an entry whose frames are sent next: the arena bytes that it reads must arrive before it."""
        ...

    def send(self, rank: int, frame: bytes) -> bool:
        """Queue a frame for a rank, without waiting; return False if it is gone or backlogged."""
        ...

    def read(self) -> None:
        """Handle all frames that have arrived."""
        ...

    def close(self) -> None:
        """Stop receiving and drop queued frames."""
        ...
