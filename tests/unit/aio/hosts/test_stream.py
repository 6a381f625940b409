"""The stream between hosts: ordered, complete, bounded, and ended by any error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from vsched.aio.hosts.link import (
    PIECE_BYTES,
    Bye,
    ByteRange,
    Kill,
    Stream,
    ToHost,
    Write,
)
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout

LAYOUT = ArenaLayout(pixel_bytes=1 << 20, pages=0, page_rows=4, row_bytes=16)
WINDOW = 2 * PIECE_BYTES


class Side:
    """One side, and the frames it has sent that are not delivered yet."""

    def __init__(self) -> None:
        self.arena = Arena.create(LAYOUT)
        self.frames: deque[bytes] = deque()
        self.received: list[Any] = []
        self.written: list[Write] = []
        self.broken: list[str] = []
        self.reachable = True
        self.stream = Stream(
            ToHost,
            self.arena,
            send=self._send,
            take=self.received.append,
            write=self.written.append,
            on_broken=self.broken.append,
            window_bytes=WINDOW,
        )

    def _send(self, frame: bytes) -> bool:
        self.frames.append(frame)
        return self.reachable


def deliver(source: Side, sink: Side) -> None:
    while source.frames:
        sink.stream.receive(source.frames.popleft())


async def test_stream_keeps_order_between_messages_and_bytes() -> None:
    """So bytes arrive before the decision that reads them."""
    engine, host = Side(), Side()
    engine.arena.put(100, b"abc")
    engine.stream.put(Kill(1))
    engine.stream.put_range(ByteRange(100, 3))
    engine.stream.put(Kill(2))
    kinds = []
    while engine.frames:
        before = len(host.received), len(host.written)
        host.stream.receive(engine.frames.popleft())
        kinds.append((len(host.received) - before[0], len(host.written) - before[1]))
    assert kinds == [(1, 0), (0, 1), (1, 0)]
    assert (host.written[0].offset, host.written[0].data) == (100, b"abc")


async def test_stream_has_a_window_under_way_and_no_more() -> None:
    """Data to a peer that does not read is bounded; arena bytes wait in the arena and go out when it reads again."""
    engine, host = Side(), Side()
    engine.arena.put(0, b"x" * (1 << 20))
    engine.stream.put_range(ByteRange(0, 1 << 20))
    assert engine.stream.put(Kill(1))
    assert sum(map(len, engine.frames)) <= WINDOW + 1000
    assert not host.received
    while engine.frames or host.frames:
        deliver(engine, host)
        deliver(host, engine)
    assert b"".join(one.data for one in host.written) == b"x" * (1 << 20)
    assert host.received == [Kill(1)]


async def test_stream_lets_a_sign_of_life_go_ahead_of_bytes_that_wait() -> None:
    """On a slow link, bytes take longer than a failure timeout; all other data keeps its order."""
    engine, host = Side(), Side()
    engine.stream.put_range(ByteRange(0, 1 << 20))
    engine.stream.put(Kill(1))
    engine.stream.put_ahead(Kill(2))
    deliver(engine, host)
    assert host.received == [Kill(2)]
    while engine.frames or host.frames:
        deliver(engine, host)
        deliver(host, engine)
    assert host.received == [Kill(2), Kill(1)]
    assert not host.broken


async def test_stream_refuses_when_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.aio.hosts.link.WAITING_MAX", 10)
    engine = Side()
    engine.stream.put_range(ByteRange(0, 1 << 20))
    taken = [engine.stream.put(Kill(1)) for _ in range(20)]
    assert taken.count(False) > 8
    assert not engine.broken


FAULTS: dict[str, tuple[Callable[[deque[bytes]], object], str]] = {
    "lost": (lambda frames: frames.popleft(), "sent frame 2, expected 1"),
    "twice": (lambda frames: frames.appendleft(frames[0]), "sent frame 1, expected 2"),
    "cut short": (lambda frames: frames.appendleft(frames.popleft()[:10]), "no message"),
    "no message": (lambda frames: frames.appendleft(frames.popleft()[:8] + b"??"), "no message"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_stream_ends_when_a_frame_is_amiss(fault: str) -> None:
    """The failure is reported once, and nothing is read or sent after it."""
    engine, host = Side(), Side()
    engine.stream.put(Kill(1))
    engine.stream.put(Kill(2))
    strike, said = FAULTS[fault]
    strike(engine.frames)
    deliver(engine, host)
    (why,) = host.broken
    assert said in why
    assert len(host.received) <= 1
    assert not host.stream.put(Bye())
    assert not host.frames


async def test_stream_ends_when_the_other_is_gone() -> None:
    engine = Side()
    engine.reachable = False
    assert not engine.stream.put(Kill(1))
    assert engine.broken == ["cannot be reached any more"]
