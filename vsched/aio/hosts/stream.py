"""An ordered stream of messages and arena bytes to another host, with bounded memory on both sides.

Each frame has a number, so that a lost frame ends the stream, and acknowledges the bytes received in the other
direction. At most a window of bytes is in flight. The rest waits here: messages encoded, arena bytes as ranges that are
read when they are sent. So a slow link needs no memory. The bytes of a step are read while it is in flight, when
nothing may overwrite them.

Independent of sockets: the owner passes frames in and out.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from vsched.aio.hosts.messages import Alive, ByteRange, Write
from vsched.transport.arena import Arena

_HEADER = struct.Struct("<QQ")
WINDOW_BYTES = 4 << 20
"""Maximum bytes in flight in one direction; allows 400 MB/s at a round-trip time of 10 ms."""
PIECE_BYTES = 256 << 10
"""Arena bytes are sent in pieces of this size, or of half a window, so that urgent frames can go in between."""
WAITING_MAX = 10_000
"""Maximum number of queued messages and ranges; a peer that is further behind is stuck."""
_encoder = msgspec.msgpack.Encoder()


class Stream:
    """One side of the stream.

    `send` passes a frame to a socket, without waiting, and returns whether it could. `write` gets arena bytes, `take`
    all other messages except `Alive`. `on_broken` is called once when the stream fails, with a reason that completes a
    sentence after the name of the peer.

    Attributes:
        broken: Whether it has failed or was closed.
        bytes_sent: Total size of all message bodies so far.
    """

    def __init__(
        self,
        messages: Any,
        arena: Arena | None,
        *,
        send: Callable[[bytes], bool],
        take: Callable[[Any], None],
        write: Callable[[Write], None],
        on_broken: Callable[[str], None],
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Create one side; `messages` is the type of received messages, and ranges are read from `arena`."""
        self.arena = arena
        self.broken = False
        self.bytes_sent = 0
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._send = send
        self._take = take
        self._write = write
        self._on_broken = on_broken
        self._window_bytes = window_bytes
        self._piece_bytes = min(PIECE_BYTES, window_bytes // 2)
        self._waiting: deque[bytes | ByteRange] = deque()
        self._sent = self._received = 0
        self._bytes_taken = self._bytes_reported = self._bytes_acknowledged = 0
        self._bytes_at_last = 0
        """`bytes_sent` after the last frame taken from the queue."""
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._received_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    # --- sending ---

    def put(self, message: Any) -> bool:
        """Send a message after everything queued before; return False if the queue is full or the stream has failed."""
        if self.broken or len(self._waiting) >= WAITING_MAX:
            return False
        self._waiting.append(_encoder.encode(message))
        self._pump()
        return not self.broken

    def put_ahead(self, message: Any) -> None:
        """Send a message ahead of the queue: a sign of life must not wait for bytes."""
        if not self.broken:
            self._frame(_encoder.encode(message))

    def put_range(self, where: ByteRange) -> None:
        """Queue arena bytes, to be written at the same offset of the peer's arena."""
        if where.size and not self.broken:
            self._waiting.append(where)

    def _pump(self) -> None:
        """Send all queued data that fits into the window."""
        while self._waiting and not self.broken:
            first = self._waiting[0]
            size = (
                min(first.size, self._piece_bytes) if isinstance(first, ByteRange) else len(first)
            )
            under_way = self.bytes_sent - self._bytes_acknowledged
            # A message of a whole window waits for those before it, but not for signs of life, of
            # which one may always be under way.
            waits = self._bytes_acknowledged < self._bytes_at_last
            if waits and under_way + size > self._window_bytes:
                return
            if isinstance(first, ByteRange):
                body = self._piece(first, size)
            else:
                body = first
                self._waiting.popleft()
            self._frame(body)
            self._bytes_at_last = self.bytes_sent

    def _piece(self, where: ByteRange, size: int) -> bytes:
        assert self.arena is not None, "only a side with an arena sends bytes"
        rest = where.size - size
        if rest:
            self._waiting[0] = ByteRange(where.offset + size, rest)
        else:
            self._waiting.popleft()
        return _encoder.encode(Write(where.offset, self.arena.copy(where.offset, size)))

    def _frame(self, body: bytes) -> None:
        self._sent += 1
        self.bytes_sent += len(body)
        self._bytes_reported = self._bytes_taken
        self._sent_s = self._loop.time()
        if not self._send(_HEADER.pack(self._sent, self._bytes_taken) + body):
            self.fail("cannot be reached any more")

    # --- receiving ---

    def receive(self, frame: bytes) -> None:
        """Handle a received frame."""
        if self.broken:
            return
        self._received_s = self._loop.time()
        try:
            number, acknowledged = _HEADER.unpack_from(frame)
            body = memoryview(frame)[_HEADER.size :]
            message = self._decoder.decode(body)
        except (struct.error, msgspec.DecodeError):
            self.fail("sent a frame that is no message")
            return
        if number != self._received + 1 or not self._bytes_acknowledged <= acknowledged <= (
            self.bytes_sent
        ):
            self.fail(f"sent frame {number}, expected {self._received + 1}")
            return
        self._received = number
        self._bytes_acknowledged = acknowledged
        if isinstance(message, Write):
            self._write(message)
        elif not isinstance(message, Alive):
            self._take(message)
        self._bytes_taken += len(body)
        if self._bytes_taken - self._bytes_reported >= self._window_bytes // 4:
            self.put_ahead(Alive())
        self._pump()

    # --- liveness ---

    def watch(self, *, alive_s: float, silence_s: float, look: Callable[[], None]) -> None:
        """From now on send something every `alive_s`, and fail when nothing is received for `silence_s`.

        `look` reads frames that have arrived already: this process may have been suspended itself.
        """
        self._received_s = self._loop.time()

        def tick() -> None:
            if self.broken:
                return
            if self._loop.time() - self._received_s > silence_s:
                look()
            silent_s = self._loop.time() - self._received_s
            if silent_s > silence_s:
                self.fail(f"was silent for {silent_s:.1f} s")
                return
            if self._loop.time() - self._sent_s >= alive_s / 2:
                self.put_ahead(Alive())
            self._timer = self._loop.call_later(alive_s / 2, tick)

        tick()

    def fail(self, why: str) -> None:
        """End the stream and report why."""
        if not self.broken:
            self.close()
            self._on_broken(why)

    def close(self) -> None:
        """Stop sending and receiving."""
        self.broken = True
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
