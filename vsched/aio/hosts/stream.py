"""An ordered stream of messages and arena bytes to another host, with bounded memory on both sides.

Each frame has a number, so a gap ends the stream instead of leaving a hole, and says how many bytes were taken of the
other direction. Not more than a window of bytes is ever under way; what else is to be sent waits here, messages as they
are, arena bytes as a range that is read when its turn comes. So a slow link costs no memory, and the bytes of a step
are read while it is in flight: as long as nobody else may write there.

Nothing here knows of sockets: whoever has one hands frames in and out.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from vsched.aio.hosts.messages import Alive, ByteRange, Held, Write
from vsched.transport.arena import Arena

_HEADER = struct.Struct("<QQ")
WINDOW_BYTES = 4 << 20
"""Bytes that may be under way in one direction; at 10 ms there and back it allows 400 MB a second."""
PIECE_BYTES = 256 << 10
"""Arena bytes travel in pieces of this size, or half a window, so that what is urgent can go between the bytes of two
streams."""
WAITING_MAX = 10_000
"""Messages that wait for the window; each is a decision, or a piece of one's bytes, so more is a side that is stuck."""
_encoder = msgspec.msgpack.Encoder()


class Barrier:
    """A place in what waits to be sent that nothing passes until it is lifted; `ranges` go in its stead then.

    While it is the first that waits, signs of life are `Held`.
    """

    def __init__(self) -> None:
        self.lifted = False
        self.ranges: Sequence[ByteRange] = ()


class Stream:
    """One side of the stream.

    `send` hands a frame to a socket, without waiting, and returns whether it could; `take` gets each message that the
    other side put in, but for `Alive` and those that `write` gets: arena bytes. `on_broken` is called once, when the
    stream cannot go on, with why in words that go on after the other's name.

    Attributes:
        broken: Whether it has ended, by itself or by `close`.
        bytes_sent: Of all frames so far.
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
        """Prepare; `messages` is the type of what is heard, and `arena` what ranges are read from."""
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
        self._waiting: deque[bytes | ByteRange | Barrier] = deque()
        self._sent = self._heard = 0
        self._bytes_taken = self._bytes_told = self._bytes_acknowledged = 0
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    # --- sending ---

    def put(self, message: Any) -> bool:
        """Send a message after all that was put in before; return False when too much waits, or it is broken."""
        if self.broken or len(self._waiting) >= WAITING_MAX:
            return False
        self._waiting.append(_encoder.encode(message))
        self._pump()
        return not self.broken

    def put_ahead(self, message: Any) -> None:
        """Send a message before all that waits: it says that somebody lives, and must not wait for bytes."""
        if not self.broken:
            self._frame(_encoder.encode(message))

    def put_range(self, where: ByteRange) -> None:
        """Send arena bytes, to the same place of the other's arena."""
        if where.size and not self.broken:
            self._waiting.append(where)

    def put_barrier(self) -> Barrier:
        """Let nothing that is put in after this go before it is lifted; signs of life go on."""
        barrier = Barrier()
        self._waiting.append(barrier)
        return barrier

    def lift(self, barrier: Barrier, ranges: Sequence[ByteRange]) -> None:
        """Send these arena bytes, and then what waits behind the barrier."""
        barrier.lifted, barrier.ranges = True, ranges
        self._pump()

    def _pump(self) -> None:
        """Send what the window has room for."""
        while self._waiting and not self.broken:
            first = self._waiting[0]
            if isinstance(first, Barrier):
                if not first.lifted:
                    return
                self._waiting.popleft()
                self._waiting.extendleft(reversed(first.ranges))
                continue
            size = (
                min(first.size, self._piece_bytes) if isinstance(first, ByteRange) else len(first)
            )
            under_way = self.bytes_sent - self._bytes_acknowledged
            if under_way and under_way + size > self._window_bytes:
                return
            if isinstance(first, ByteRange):
                body = self._piece(first, size)
            else:
                body = first
                self._waiting.popleft()
            self._frame(body)

    def _piece(self, where: ByteRange, size: int) -> bytes:
        assert self.arena is not None, "nobody sends bytes without an arena"
        rest = where.size - size
        if rest:
            self._waiting[0] = ByteRange(where.offset + size, rest)
        else:
            self._waiting.popleft()
        return _encoder.encode(Write(where.offset, self.arena.copy(where.offset, size)))

    def _frame(self, body: bytes) -> None:
        self._sent += 1
        self.bytes_sent += len(body)
        self._bytes_told = self._bytes_taken
        self._sent_s = self._loop.time()
        if not self._send(_HEADER.pack(self._sent, self._bytes_taken) + body):
            self.fail("cannot be reached any more")

    # --- hearing ---

    def hear(self, frame: bytes) -> None:
        """Take a frame that has come."""
        if self.broken:
            return
        self._heard_s = self._loop.time()
        try:
            number, acknowledged = _HEADER.unpack_from(frame)
            body = memoryview(frame)[_HEADER.size :]
            message = self._decoder.decode(body)
        except (struct.error, msgspec.DecodeError):
            self.fail("sent a frame that is no message")
            return
        if number != self._heard + 1 or not self._bytes_acknowledged <= acknowledged <= (
            self.bytes_sent
        ):
            self.fail(f"sent frame {number}, expected {self._heard + 1}")
            return
        self._heard = number
        self._bytes_acknowledged = acknowledged
        if isinstance(message, Write):
            self._write(message)
        elif not isinstance(message, Alive):
            self._take(message)
        self._bytes_taken += len(body)
        if self._bytes_taken - self._bytes_told >= self._window_bytes // 4:
            self._say_alive()
        self._pump()

    # --- life ---

    def watch(self, *, alive_s: float, silence_s: float, look: Callable[[], None]) -> None:
        """Say something every `alive_s` from now on, and break when nothing is heard for `silence_s`.

        `look` hands in what has come and was not heard yet: this process may have stood still itself.
        """
        self._heard_s = self._loop.time()

        def tick() -> None:
            if self.broken:
                return
            if self._loop.time() - self._heard_s > silence_s:
                look()
            silent_s = self._loop.time() - self._heard_s
            if silent_s > silence_s:
                self.fail(f"was silent for {silent_s:.1f} s")
                return
            if self._loop.time() - self._sent_s >= alive_s / 2:
                self._say_alive()
            self._timer = self._loop.call_later(alive_s / 2, tick)

        tick()

    def _say_alive(self) -> None:
        first = self._waiting[0] if self._waiting else None
        self.put_ahead(Held() if isinstance(first, Barrier) else Alive())

    def fail(self, why: str) -> None:
        """End it, and tell."""
        if not self.broken:
            self.close()
            self._on_broken(why)

    def close(self) -> None:
        """Say and hear nothing more."""
        self.broken = True
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
