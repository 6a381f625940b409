"""A host on a slow link: bytes are delayed, and no rank is declared dead meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import pytest

from tests.unit.rank.fake_plugin import NAME, model_info
from vsched.aio.hosts.link import (
    PIECE_BYTES,
    VERSION,
    WINDOW_BYTES,
    Bye,
    ByteRange,
    Fetch,
    Fetched,
    FromRank,
    Launch,
    OpenGroups,
    Stream,
    ToEngine,
    ToRank,
    Write,
)
from vsched.aio.hosts.server import HostServer
from vsched.aio.launcher import OnExit
from vsched.failures import EncodeErrorKind
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import OnFrame, pulse_identity, rank_identity
from vsched.types import ArenaLayout
from vsched.wire import ON_THE_WAY, EncodeResult, LogEntry, Pulse, encode_report
from vsched.worker.contract import WorkerSettings
from vsched.worker.spec import EncodeRole, RankSpec

LAYOUT = ArenaLayout(pixel_bytes=2 * WINDOW_BYTES, pages=0, page_rows=4, row_bytes=16)
ROLE = EncodeRole(
    address="", plugin=NAME, settings=WorkerSettings(), items=4, tokens=0, pixels_max=0
)
SPEC = RankSpec(rank=0, secret="", layout=LAYOUT, info=model_info(), timeout_s=60, encode=ROLE)
FIRST = rank_identity(0)


class Link:
    """The leader's end of a rank's link; keeps the frames for the rank."""

    def __init__(self, on_frame: OnFrame) -> None:
        self.report = on_frame
        self.received: list[bytes] = []

    def carry(self, _entry: LogEntry) -> None:
        """No-op."""

    def send(self, _rank: int, frame: bytes) -> bool:
        self.received.append(frame)
        return True

    def read(self) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


class Rank:
    """A rank that runs until it is ended."""

    pid = 1

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.ended = False

    async def end(self, *, grace_s: float) -> None:
        await self.may_end.wait()
        self.ended = True


class Home:
    """A launcher whose links lead nowhere."""

    name = run_dir = ""

    def __init__(self) -> None:
        self.places = 0
        self.rank = Rank()

    def choose_host(self, *_: object) -> Home:
        self.places += 1
        return self

    def open_link(self, _group: str, on_frame: OnFrame) -> Link:
        self.link = Link(on_frame)
        return self.link

    def launch(self, _spec: RankSpec, *, threads: int, on_exit: OnExit) -> Rank:
        return self.rank

    def close(self) -> None:
        """No-op."""


class Wire:
    """An engine's stream to a host with one rank, frame by frame."""

    def __init__(self) -> None:
        self.home = Home()
        self.there: deque[bytes] = deque()
        self.back: deque[bytes] = deque()
        self.received: list[object] = []
        self.server = HostServer(self.home, send=self._answer, read=lambda: None, name="far")
        self.engine = Stream(
            ToEngine,
            Arena.create(LAYOUT),
            send=self._send,
            take=self.received.append,
            write=self.received.append,
            on_broken=self.received.append,
        )
        self.engine.put(OpenGroups(VERSION, "engine", ["encode"], LAYOUT, 0.0, 60.0))
        self.engine.put(Launch(SPEC))
        self.deliver()

    def _send(self, frame: bytes) -> bool:
        self.there.append(frame)
        return True

    def _answer(self, _peer: bytes, frame: bytes) -> bool:
        self.back.append(frame)
        return True

    def deliver(self) -> None:
        """Deliver all frames in flight."""
        while self.there or self.back:
            while self.there:
                self.server.receive(b"peer", self.there.popleft())
            while self.back:
                self.engine.receive(self.back.popleft())


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    yield wire
    wire.engine.close()
    await wire.server.close()


async def test_server_reports_pending_bytes_to_ranks(wire: Wire) -> None:
    """Once per piece of bytes."""
    wire.engine.put_range(ByteRange(0, PIECE_BYTES))
    wire.engine.put(ToRank("encode", 0, b"order"))
    wire.deliver()
    assert wire.home.link.received == [ON_THE_WAY, b"order"]
    wire.home.link.received.clear()
    wire.engine.put_range(ByteRange(0, 3 * PIECE_BYTES))
    wire.engine.put(ToRank("encode", 0, b"entry"))
    wire.deliver()
    assert wire.home.link.received == [*[ON_THE_WAY] * 3, b"entry"]


async def test_server_lets_pulses_go_ahead_of_rows(wire: Wire) -> None:
    """Rows fill the window and wait; the engine still learns that the rank is alive."""
    report = wire.home.link.report
    wire.engine.put(Fetch("encode", 1, [ByteRange(0, 2 * WINDOW_BYTES)]))
    while wire.there:
        wire.server.receive(b"peer", wire.there.popleft())
    wire.received.clear()
    report(FIRST, encode_report(EncodeResult(1, None, 0)))
    pulse = FromRank("encode", pulse_identity(0), encode_report(Pulse()))
    report(pulse.identity, pulse.frame)
    wire.deliver()
    kinds = [type(one) for one in wire.received]
    assert wire.received.count(pulse) == 1
    behind = kinds[wire.received.index(pulse) :].count(Write)
    assert behind * PIECE_BYTES >= WINDOW_BYTES
    assert kinds[-2:] == [Fetched, FromRank], "its result comes after its rows"


@pytest.mark.parametrize(("failure", "rows"), [(None, 1), (EncodeErrorKind.OUT_OF_MEMORY, 0)])
async def test_server_sends_the_rows_of_a_step_that_succeeded(
    wire: Wire, failure: EncodeErrorKind | None, rows: int
) -> None:
    """Each step's rows precede its result; a failed step has none."""
    report = wire.home.link.report
    for step in (1, 2):
        wire.engine.put(Fetch("encode", step, [ByteRange(100 * step, 8)]))
    wire.deliver()
    wire.received.clear()
    for step in (1, 2):
        report(FIRST, encode_report(EncodeResult(step, failure, 0)))
        wire.deliver()
        *written, fetched, result = wire.received
        assert [(one.offset, len(one.data)) for one in written if isinstance(one, Write)] == (
            [(100 * step, 8)] * rows
        )
        assert fetched == Fetched("encode", step)
        assert isinstance(result, FromRank)
        wire.received.clear()


async def test_closing_server_accepts_no_new_request(wire: Wire) -> None:
    """An engine may reconnect while ranks are ending; nothing would end the ranks that it starts then."""
    said: list[bytes] = []

    def say(frame: bytes) -> bool:
        said.append(frame)
        return True

    again = Stream(
        ToEngine,
        None,
        send=say,
        take=wire.received.append,
        write=wire.received.append,
        on_broken=wire.received.append,
    )
    again.put(OpenGroups(VERSION, "engine", ["encode"], LAYOUT, 0.0, 60.0))
    wire.home.rank.may_end.clear()
    closing = asyncio.create_task(wire.server.close())
    await asyncio.sleep(0)
    wire.server.receive(b"another peer", said.pop())
    wire.home.rank.may_end.set()
    await closing
    assert wire.home.places == 1
    again.close()


async def test_server_that_closes_waits_for_ranks_of_starts_that_are_over(wire: Wire) -> None:
    wire.home.rank.may_end.clear()
    wire.engine.put(Bye())
    wire.deliver()
    closing = asyncio.create_task(wire.server.close())
    await asyncio.sleep(0)
    assert not closing.done()
    wire.home.rank.may_end.set()
    await closing
    assert wire.home.rank.ended
