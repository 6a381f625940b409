"""The messages between the engine and the process of a call: a size, then that many bytes."""

from __future__ import annotations

from typing import Protocol

HEAD_BYTES = 8
ANSWERED, KILLED = b"a", b"k"
"""The first byte of a reply: an answer follows, or the number of the signal that killed the process."""


class Channel(Protocol):
    """One end of a stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """Return that many bytes; fewer at the end of the stream."""
        ...

    def write(self, content: bytes, /) -> object:
        """Write bytes, perhaps into a buffer."""
        ...

    def flush(self) -> object:
        """Send what is in the buffer."""
        ...


def head_of(content: bytes) -> bytes:
    """Return the bytes that go before a message."""
    return len(content).to_bytes(HEAD_BYTES, "little")


def send_frame(channel: Channel, content: bytes) -> None:
    """Write one message and flush it."""
    channel.write(head_of(content))
    channel.write(content)  # not copied together with its size: it may be an image
    channel.flush()


def read_frame(channel: Channel) -> bytes:
    """Return the next message.

    Raises:
        EOFError: When the stream ends before the message does.
    """
    head = channel.read(HEAD_BYTES)
    size = int.from_bytes(head, "little")
    content = channel.read(size)
    if len(head) < HEAD_BYTES or len(content) < size:
        raise EOFError
    return content
