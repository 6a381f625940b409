"""The stream between hosts: ordered, complete, bounded; with exactly the data that ranks read and write."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from vsched.aio.hosts.link import (
    PIECE_BYTES,
    WINDOW_BYTES,
    Bye,
    ByteRange,
    Kill,
    Stream,
    ToHost,
    Write,
)
from vsched.aio.hosts.remote import Traffic, written_by
from vsched.kernel.decisions import (
    ChunkItem,
    ChunkPlan,
    EncodeDecision,
    EncodeTask,
    GenerateDecision,
    Join,
    Leave,
    RequestData,
)
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout, Extent, ItemPlace, SamplingParams
from vsched.wire import Heartbeat

LAYOUT = ArenaLayout(pixel_bytes=1 << 20, pages=0, page_rows=4, row_bytes=16)
WINDOW = 2 * PIECE_BYTES


class Side:
    """One side of a stream, and the frames it has sent that are not delivered yet."""

    def __init__(
        self,
        messages: Any = ToHost,
        *,
        layout: ArenaLayout = LAYOUT,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.arena = Arena.create(layout)
        self.frames: deque[bytes] = deque()
        self.received: list[Any] = []
        self.broken: list[str] = []
        self.reachable = True
        self.stream = Stream(
            messages,
            self.arena,
            send=self._send,
            take=self.received.append,
            write=self.received.append,
            on_broken=self.broken.append,
            window_bytes=window_bytes,
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
    deliver(engine, host)
    assert host.received == [Kill(1), Write(100, b"abc"), Kill(2)]


async def test_stream_has_a_window_under_way_and_no_more() -> None:
    """Data to a peer that does not read is bounded; arena bytes wait in the arena and go out when it reads again.

    A sign of life goes ahead of them: on a slow link, bytes take longer than a failure timeout.
    """
    engine, host = Side(window_bytes=WINDOW), Side()
    engine.arena.put(0, b"x" * (1 << 20))
    engine.stream.put_range(ByteRange(0, 1 << 20))
    assert engine.stream.put(Kill(1))
    engine.stream.put_ahead(Kill(2))
    assert sum(map(len, engine.frames)) <= WINDOW + 1000
    while engine.frames or host.frames:
        deliver(engine, host)
        deliver(host, engine)
    *written, last = [one for one in host.received if one != Kill(2)]
    assert b"".join(one.data for one in written) == b"x" * (1 << 20)
    assert last == Kill(1)
    assert host.received.index(Kill(2)) * PIECE_BYTES == WINDOW
    assert not host.broken


async def test_stream_refuses_when_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.aio.hosts.link.WAITING_MAX", 10)
    engine = Side(window_bytes=WINDOW)
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


SMALL = ArenaLayout(pixel_bytes=100, pages=8, page_rows=4, row_bytes=16)


def rows(page: int, first: int, count: int) -> ByteRange:
    """Range of embedding rows that begin in a page."""
    return ByteRange(SMALL.embedding_offset + 64 * page + 16 * first, 16 * count)


def joined(number: int, slot: int, items: list[ItemPlace] | None) -> Join:
    data = None
    if items is not None:
        data = RequestData(b"", 40, items, SamplingParams(), ())
    return Join(number, slot, 0, 40, [], data)


def test_traffic_of_a_batch_is_its_pixels_there_and_its_rows_back() -> None:
    task = EncodeTask(b"key", 6, Extent(10, 30), [5, 2])
    batch = EncodeDecision(1, [task])
    traffic = Traffic(SMALL)
    assert traffic.read_by(batch) == [ByteRange(10, 30)]
    assert written_by(SMALL, batch.tasks) == [rows(5, 0, 4), rows(2, 0, 2)]


@pytest.mark.parametrize(
    ("place", "span", "pages", "ranges"),
    [
        # The end of the first page, and the beginning of the second.
        (ItemPlace(10, 8), (12, 17), [6, 1], [rows(6, 2, 2), rows(1, 0, 3)]),
        # Row numbers of an item with separators count placeholders only.
        (ItemPlace(10, 4, b"", ((10, 12), (13, 15))), (12, 14), [3], [rows(3, 2, 1)]),
        # Neighbouring pages are one range.
        (ItemPlace(10, 12), (10, 22), [2, 3, 5], [rows(2, 0, 8), rows(5, 0, 4)]),
    ],
)
def test_traffic_of_a_chunk_is_the_rows_that_it_covers(
    place: ItemPlace, span: tuple[int, int], pages: list[int], ranges: list[ByteRange]
) -> None:
    traffic = Traffic(SMALL)
    chunk = ChunkPlan(3, *span, [ChunkItem(10, place.tokens, pages)])
    decision = GenerateDecision(1, joined=[joined(7, 3, [place])], chunks=[chunk])
    assert traffic.read_by(decision) == ranges
    assert traffic.read_by(Heartbeat()) == []


def test_traffic_tracks_requests_that_return_and_forgets_those_that_left() -> None:
    traffic = Traffic(SMALL)
    chunk = ChunkPlan(1, 0, 4, [ChunkItem(0, 4, [0])])
    here = [ItemPlace(0, 4)]
    traffic.read_by(GenerateDecision(1, joined=[joined(5, 1, here)]))
    traffic.read_by(GenerateDecision(2, left=[Leave(5, 1, keep=True)]))
    back = GenerateDecision(3, joined=[joined(5, 1, None)], chunks=[chunk])
    assert traffic.read_by(back) == [rows(0, 0, 4)]
    # It finishes, which no decision says, and another request takes its slot.
    traffic.read_by(GenerateDecision(4, joined=[joined(6, 1, here)]))
    assert set(traffic._items) == {6}
    traffic.read_by(GenerateDecision(5, left=[Leave(6, 1, keep=True)], forgotten=[]))
    traffic.read_by(GenerateDecision(6, forgotten=[6]))
    assert not traffic._items
    assert not traffic._slots
