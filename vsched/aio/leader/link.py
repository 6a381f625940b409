"""What a leader needs of the links to its ranks."""

from __future__ import annotations

from typing import Protocol

from vsched.wire import LogEntry


class LeaderEnd(Protocol):
    """The leader's end of the links to the ranks of one group; see `vsched.transport.zmq_link.LeaderLink`."""

    def carry(self, entry: LogEntry) -> None:
        """Take note of an entry whose frames are sent next: what it reads of the arena has to be there before."""
        ...

    def send(self, rank: int, frame: bytes) -> bool:
        """Queue a frame for a rank, never waiting; return False when it is gone or backlogged."""
        ...

    def read(self) -> None:
        """Take everything that has come."""
        ...

    def close(self) -> None:
        """Stop listening and drop what is queued."""
        ...
