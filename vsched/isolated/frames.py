"""Frames between the engine and the process of a call: an 8-byte size, then the content."""

from __future__ import annotations

from typing import Protocol

HEAD_BYTES = 8
ANSWERED, KILLED = b"a", b"k"
"""The first byte of a reply; an answer, or the number of the signal that killed the process, follows it."""


class Channel(Protocol):
    """One end of a byte stream."""

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes; fewer at the end of the stream."""
        ...

    def write(self, content: bytes, /) -> object:
        """Write bytes, possibly to a buffer."""
        ...

    def flush(self) -> object:
        """Send the buffered bytes."""
        ...


def frame_header(content: bytes) -> bytes:
    """Return the header of a frame."""
    return len(content).to_bytes(HEAD_BYTES, "little")


def send_frame(channel: Channel, content: bytes) -> None:
    """Write one frame and flush it."""
    channel.write(frame_header(content))
    channel.write(content)  # separately, to avoid a copy: it may be an image
    channel.flush()


def read_frame(channel: Channel) -> bytes:
    """Return the content of the next frame.

    Raises:
        EOFError: When the stream ends within the frame.
    """
    head = channel.read(HEAD_BYTES)
    size = int.from_bytes(head, "little")
    content = channel.read(size)
    if len(head) < HEAD_BYTES or len(content) < size:
        raise EOFError
    return content
