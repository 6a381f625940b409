"""A link between two processes over a socket pair; one frame carries all messages of an event loop iteration.

When a process ends, in whatever manner, its link closes, and the other side notices at once. Sending never waits;
senders of large messages wait for `writable` first. Buffered data is limited on both sides: a peer that does not read
is dropped once too many bytes wait for it, and so is a peer that sends too large a frame.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

import msgspec

logger = logging.getLogger(__name__)
WAITING_BYTES_MAX = 64 << 20
"""Maximum bytes that may wait to be read by the peer, in addition to request bodies."""
BEAT_S = 1.0
"""Interval at which each side sends at least a sign of life."""
SILENT_S = 60.0
"""A peer that has sent nothing for this time is dropped: its event loop hangs, or it is stopped."""
ORDER_BYTES_MAX = 16 << 20
_SIZE_BYTES = 4
_encoder = msgspec.msgpack.Encoder()


class Link(asyncio.Protocol):
    """One end; `take` gets each frame, decoded as `kind`, and `on_lost` is called once, with the reason."""

    def __init__(
        self,
        kind: Any,
        take: Callable[[Any], None],
        on_lost: Callable[[str], None],
        *,
        frame_bytes_max: int = WAITING_BYTES_MAX,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        """Create an end, to be started by `open`, with limits for a received frame and for unsent data."""
        self._frame_bytes_max = frame_bytes_max
        self._waiting_bytes_max = waiting_bytes_max
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._take = take
        self._on_lost = on_lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost = False
        self._received_s = asyncio.get_running_loop().time()

    async def open(self, end: socket.socket) -> None:
        """Start on one socket of a pair."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass of it

    def send(self, content: object) -> None:
        """Send a frame; on a lost link it is dropped."""
        transport = self._transport
        if self.lost or transport is None:
            return
        frame = framed(_encoder.encode(content))
        transport.write(frame)
        waiting = transport.get_write_buffer_size()
        if waiting > self._waiting_bytes_max:
            self.lose(f"does not read: {waiting} bytes wait, limit {self._waiting_bytes_max}")

    async def writable(self) -> None:
        """Wait until little data is unsent.

        Blocks: until the peer reads, or the link is lost.
        """
        await self._writable.wait()

    def data_received(self, data: bytes) -> None:
        """Handle the complete frames."""
        self._received_s = asyncio.get_running_loop().time()
        received = self._received
        received += data
        at = 0
        while len(received) - at >= _SIZE_BYTES:
            start = at + _SIZE_BYTES
            size = int.from_bytes(received[at:start], "little")
            if size > self._frame_bytes_max:
                self.lose(f"sent a frame of {size} bytes, limit {self._frame_bytes_max}")
            if self.lost:
                return
            end = start + size
            if len(received) < end:
                break
            try:
                with memoryview(received) as view, view[start:end] as body:
                    content = self._decoder.decode(body)
                self._take(content)
            except Exception:
                logger.exception("a message could not be taken")
                self.lose("sent what could not be taken")
                return
            at = end
        del received[:at]

    def silent_s(self) -> float:
        """Time since the last data from the peer."""
        return asyncio.get_running_loop().time() - self._received_s

    def pause_writing(self) -> None:
        """Clear `writable`."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Set `writable`."""
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Report the loss of the peer."""
        self.lose(str(error or "has closed its link"))

    def lose(self, why: str) -> None:
        """Drop the peer; idempotent."""
        if self.lost:
            return
        self.lost = True
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(why)

    def close(self) -> None:
        """Send unsent data and close, without calling `on_lost`."""
        self.lost = True
        self._writable.set()
        if self._transport is not None:
            self._transport.close()


def framed(body: bytes) -> bytes:
    """Add the frame header."""
    return len(body).to_bytes(_SIZE_BYTES, "little") + body


def read_order(end: socket.socket) -> bytes:
    """Read the first frame of a link.

    Blocks: until the peer has sent it, or is gone.

    Raises:
        EOFError: If the peer is gone.
    """
    size = int.from_bytes(_read(end, _SIZE_BYTES), "little")
    assert size <= ORDER_BYTES_MAX, "an order is small"
    return _read(end, size)


def _read(end: socket.socket, size: int) -> bytes:
    body = end.recv(size, socket.MSG_WAITALL)
    if len(body) < size:
        raise EOFError("the engine is gone")
    return body
