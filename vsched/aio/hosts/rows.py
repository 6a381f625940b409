"""Arena bytes that one side of a stream asks the other for: what is due, what was asked, and the way between two hosts.

A host fetches rows from another as an engine does: it asks, and takes bytes only where it has asked for some. So asking
is the reservation, and nothing is ever sent to memory that is not there. A stream carries both, with its window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from vsched.aio.hosts.messages import (
    ByteRange,
    Fetch,
    Fetched,
    FromOwner,
    OpenGroups,
    Pull,
    ToOwner,
    Write,
)
from vsched.aio.hosts.stream import Stream
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout

Then = Callable[[bool], object]
"""Called once: whether the bytes have come."""
ASKED_MAX = 10_000
"""Fetches that may wait for their steps; more is a side that is confused."""


class SourceEnd(Protocol):
    """This host's end of a link to another; see `vsched.aio.hosts.sockets.EngineSocket`."""

    def send(self, frame: bytes) -> bool: ...

    def read(self) -> None: ...

    def close(self) -> None: ...


class Due:
    """What was asked for and has not come, by number.

    Attributes:
        bytes_taken: Arena bytes that came.
    """

    def __init__(self) -> None:
        self.bytes_taken = 0
        self._due: dict[int, tuple[Sequence[ByteRange], Then]] = {}

    def expect(self, number: int, ranges: Sequence[ByteRange], then: Then) -> None:
        """Take bytes there until they are complete."""
        self._due[number] = (ranges, then)

    def write(self, message: Write, arena: Arena) -> bool:
        """Take bytes; False, and nothing is written, where none are due."""
        start, stop = message.offset, message.offset + len(message.data)
        due = any(
            where.offset <= start and stop <= where.offset + where.size
            for ranges, _ in self._due.values()
            for where in ranges
        )
        if due:
            arena.put(start, message.data)
            self.bytes_taken += len(message.data)
        return due

    def settle(self, message: Fetched) -> bool:
        """What has this number is complete; False where there is none."""
        asked = self._due.pop(message.number, None)
        if asked is not None:
            asked[1](message.sent)
        return asked is not None

    def fail(self) -> None:
        """Nothing more comes."""
        due, self._due = self._due, {}
        for _, then in due.values():
            then(False)


class Owed:
    """What others asked of the arena of one start: it goes out as soon as the step is done that writes it."""

    def __init__(self) -> None:
        self._asked: dict[str, list[tuple[Stream, Fetch]]] = {}
        self._done: dict[str, tuple[int, bool]] = {}

    def ask(self, stream: Stream, fetch: Fetch) -> None:
        """Send these bytes, now or when their step is done."""
        done, succeeded = self._done.get(fetch.group, (0, True))
        asked = self._asked.setdefault(fetch.group, [])
        if fetch.step <= done:
            _send(stream, fetch, sent=succeeded or fetch.step < done)
        elif len(asked) < ASKED_MAX:
            asked.append((stream, fetch))
        else:
            stream.fail("asks for too much")

    def done(self, group: str, step: int, *, succeeded: bool) -> None:
        """A step of a group is done: its bytes may go."""
        self._done[group] = (step, succeeded)
        asked = self._asked.pop(group, [])
        self._asked[group] = [one for one in asked if one[1].step > step and not one[0].broken]
        for stream, fetch in asked:
            if fetch.step <= step:
                _send(stream, fetch, sent=succeeded)


def _send(stream: Stream, fetch: Fetch, *, sent: bool) -> None:
    for where in fetch.ranges if sent else ():
        stream.put_range(where)
    stream.put(Fetched(fetch.number, sent))


class RowSource:
    """Another host that this one fetches rows from.

    `on_reached` is called when it has answered, `on_broken` when it does not any more, with why.
    """

    def __init__(
        self,
        arena: Arena,
        opened: OpenGroups,
        *,
        on_reached: Callable[[], object],
        on_broken: Callable[[str], None],
    ) -> None:
        self._arena = arena
        self._due = Due()
        self._opened = opened
        self._on_reached = on_reached
        self._on_broken = on_broken
        self._end: SourceEnd | None = None
        self._stream = Stream(
            FromOwner,
            arena,
            send=self._send,
            take=self._take,
            write=self._write,
            on_broken=self._break,
        )
        self.hear, self.fail = self._stream.hear, self._stream.fail

    def begin(self, end: SourceEnd) -> None:
        """Say the first word, over this end of a link."""
        self._end = end
        self._fetch(0, "", 0, (), lambda sent: sent and self._on_reached())
        watch(self._stream, self._opened, end.read)

    def _send(self, frame: bytes) -> bool:
        return self._end is not None and self._end.send(frame)

    def pull(self, asked: Pull, then: Then) -> None:
        """Fetch what an engine wants here."""
        self._fetch(asked.number, asked.group, asked.step, asked.ranges, then)

    def _fetch(
        self, number: int, group: str, step: int, ranges: Sequence[ByteRange], then: Then
    ) -> None:
        self._due.expect(number, ranges, then)
        self._stream.put(Fetch(number, group, step, [*ranges]))

    def _take(self, message: Fetched) -> None:
        if not self._due.settle(message):
            self._stream.fail("answered what was not asked")

    def _write(self, message: Write) -> None:
        if not self._due.write(message, self._arena):
            self._stream.fail("sent bytes that nobody asked for")

    def _break(self, why: str) -> None:
        self._close_end()
        self._due.fail()
        self._on_broken(why)

    def close(self) -> None:
        """Take nothing more."""
        self._stream.close()
        self._close_end()
        self._due.fail()

    def _close_end(self) -> None:
        if self._end is not None:
            self._end.close()


class RowTaker:
    """Another host that fetches rows here, with the key that it was admitted by."""

    def __init__(
        self,
        owed: Owed,
        arena: Arena,
        opened: OpenGroups,
        send: Callable[[bytes, bytes], bool],
        read: Callable[[], None],
        on_broken: Callable[[], None],
    ) -> None:
        self._owed, self._layout = owed, arena.layout
        self._send = send
        self._peer = b""
        self._opened, self._read = opened, read
        self._stream = Stream(
            ToOwner,
            arena,
            send=lambda frame: self._send(self._peer, frame),
            take=self._take,
            write=lambda _write: self._stream.fail("sent bytes that nobody asked for"),
            on_broken=lambda _why: on_broken(),
        )
        self.close = self._stream.close

    def hear(self, peer: bytes, frame: bytes) -> None:
        """Take a frame; there is one connection for a key."""
        if not self._peer:
            self._peer = peer
            watch(self._stream, self._opened, self._read)
        if peer == self._peer:
            self._stream.hear(frame)

    def _take(self, message: Fetch) -> None:
        if all(is_rows(where, self._layout) for where in message.ranges):
            self._owed.ask(self._stream, message)
        else:
            self._stream.fail("asked for what is no embedding")


def is_rows(where: ByteRange, layout: ArenaLayout) -> bool:
    """Return whether a range lies in the embedding region."""
    stop = where.offset + where.size
    return layout.embedding_offset <= where.offset <= stop <= layout.total_bytes


def watch(stream: Stream, opened: OpenGroups, look: Callable[[], None]) -> None:
    """Find out when the other side of a direct way is silent: sooner than that ranks miss their engine."""
    stream.watch(alive_s=opened.alive_s, silence_s=opened.silence_s / 2, look=look)
