"""A link between two processes: frames over a pair of sockets, as many messages in one as a turn of the loop yields.

The end of a process is the end of its link, which the other sees at once, however that process ended. Nothing is ever
waited for here; who sends large things waits for `writable` before. What waits in memory is bounded on both sides: one
that does not read is given up once too many bytes wait for it, and so is one that sends a frame over the limit.
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
"""What may wait to be read by the other side, besides bodies of requests."""
BEAT_S = 1.0
"""How often each side says something, if only that it lives."""
SILENT_S = 60.0
"""A side that has said nothing for so long is given up: its loop stands still, or it is stopped."""
ORDER_BYTES_MAX = 16 << 20
_SIZE_BYTES = 4
_encoder = msgspec.msgpack.Encoder()


class Link(asyncio.Protocol):
    """One end; `take` gets each frame, decoded as `kind`, and `on_lost` is called once, with why."""

    def __init__(
        self,
        kind: Any,
        take: Callable[[Any], None],
        on_lost: Callable[[str], None],
        *,
        frame_bytes_max: int = WAITING_BYTES_MAX,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        """Begin with `open`; a frame that comes, and all that waits to go, have a limit each."""
        self._frame_bytes_max = frame_bytes_max
        self._waiting_bytes_max = waiting_bytes_max
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._take = take
        self._on_lost = on_lost
        self._heard = bytearray()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost = False
        self._heard_s = asyncio.get_running_loop().time()

    async def open(self, end: socket.socket) -> None:
        """Begin with one of a pair of sockets."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it

    def send(self, content: object) -> None:
        """Send a frame; on a link that is lost it is dropped."""
        transport = self._transport
        if self.lost or transport is None:
            return
        frame = framed(_encoder.encode(content))
        transport.write(frame)
        waiting = transport.get_write_buffer_size()
        if waiting > self._waiting_bytes_max:
            self.lose(f"does not read: {waiting} bytes wait, limit {self._waiting_bytes_max}")

    async def writable(self) -> None:
        """Wait until little waits to be read.

        Blocks: until the other side reads, or the link is lost.
        """
        await self._writable.wait()

    def data_received(self, data: bytes) -> None:
        """Take the frames that are complete."""
        self._heard_s = asyncio.get_running_loop().time()
        heard = self._heard
        heard += data
        at = 0
        while len(heard) - at >= _SIZE_BYTES:
            start = at + _SIZE_BYTES
            size = int.from_bytes(heard[at:start], "little")
            if size > self._frame_bytes_max:
                self.lose(f"sent a frame of {size} bytes, limit {self._frame_bytes_max}")
            if self.lost:
                return
            end = start + size
            if len(heard) < end:
                break
            try:
                with memoryview(heard) as view, view[start:end] as body:
                    content = self._decoder.decode(body)
                self._take(content)
            except Exception:
                logger.exception("a message could not be taken")
                self.lose("sent what could not be taken")
                return
            at = end
        del heard[:at]

    def silent_s(self) -> float:
        """Return for how long the other side has said nothing."""
        return asyncio.get_running_loop().time() - self._heard_s

    def pause_writing(self) -> None:
        """Much waits to be read."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Little waits."""
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        """The other side is gone."""
        self.lose(str(error or "has closed its link"))

    def lose(self, why: str) -> None:
        """Give the other side up; the second time this does nothing."""
        if self.lost:
            return
        self.lost = True
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(why)

    def close(self) -> None:
        """Send what waits, and close, without a word to `on_lost`."""
        self.lost = True
        self._writable.set()
        if self._transport is not None:
            self._transport.close()


def framed(body: bytes) -> bytes:
    """Return a frame."""
    return len(body).to_bytes(_SIZE_BYTES, "little") + body


def read_order(end: socket.socket) -> bytes:
    """Return what the first frame of a link holds.

    Blocks: until the other side has sent it, or is gone.

    Raises:
        EOFError: When it is gone.
    """
    size = int.from_bytes(_read(end, _SIZE_BYTES), "little")
    assert size <= ORDER_BYTES_MAX, "an order is small"
    return _read(end, size)


def _read(end: socket.socket, size: int) -> bytes:
    body = end.recv(size, socket.MSG_WAITALL)
    if len(body) < size:
        raise EOFError("the engine is gone")
    return body
