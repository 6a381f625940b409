"""A host on a slow link: bytes are delayed, and no rank is declared dead meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import zmq

from tests.machines import pretend_cores
from tests.unit.aio.hosts.test_stream import Side
from tests.unit.aio.leader.leader_harness import FakeLink
from tests.unit.rank.fake_plugin import model_info
from tests.unit.rank.worker_groups import ENCODE
from vsched.aio.hosts import server
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
    Refused,
    ToEngine,
    ToRank,
    Write,
)
from vsched.aio.hosts.server import HostServer
from vsched.aio.launcher import OnExit
from vsched.failures import EncodeErrorKind
from vsched.transport.zmq_link import OnFrame, pulse_identity, rank_identity
from vsched.types import ArenaLayout
from vsched.wire import ON_THE_WAY, EncodeResult, Pulse, encode_report
from vsched.worker.spec import HostShare, RankSpec, threads_of

LAYOUT = ArenaLayout(pixel_bytes=2 * WINDOW_BYTES, pages=0, page_rows=4, row_bytes=16)
SPEC = RankSpec(groups=("encode",), layout=LAYOUT, info=model_info(), timeout_s=60, encode=ENCODE)
FIRST = rank_identity(0)


class Rank:
    """A rank that runs until it is ended."""

    pid = 1

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.ended = False

    async def wait_exit(self, *, grace_s: float) -> None:
        await self.may_end.wait()
        self.ended = True


class Home:
    """A launcher whose links lead nowhere."""

    name = run_dir = ""

    def __init__(self) -> None:
        self.places = 0
        self.rank = Rank()
        self.launched: list[tuple[int, int]] = []
        """Threads and memory limit of each rank."""

    def choose_host(self, *_: object) -> Home:
        self.places += 1
        return self

    def open_link(self, _group: str, on_frame: OnFrame) -> FakeLink:
        self.link = FakeLink(on_frame)
        return self.link

    def launch(self, spec: RankSpec, on_exit: OnExit) -> Rank:
        self.launched.append((threads_of(spec), spec.memory_limit_bytes))
        return self.rank

    def close(self) -> None:
        """No-op."""


class Wire:
    """An engine's stream to a host with one rank, frame by frame."""

    def __init__(self, spec: RankSpec = SPEC, cores: int | None = None) -> None:
        self.home = Home()
        self.engine = Side(ToEngine, layout=LAYOUT)
        self.answers: deque[bytes] = deque()
        self.server = HostServer(
            self.home, send=self._answer, read=lambda: None, name="far", cores=cores
        )
        self.engine.stream.put(OpenGroups(VERSION, "engine", ["encode"], LAYOUT, 0.0, 60.0))
        self.opening = self.engine.frames[0]
        self.engine.stream.put(Launch(spec))
        self.deliver()

    def _answer(self, _peer: bytes, frame: bytes) -> bool:
        self.answers.append(frame)
        return True

    def reach_server(self) -> None:
        while self.engine.frames:
            self.server.receive(b"peer", self.engine.frames.popleft())

    def deliver(self) -> None:
        """Deliver all frames in flight."""
        while self.engine.frames or self.answers:
            self.reach_server()
            while self.answers:
                self.engine.stream.receive(self.answers.popleft())


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    yield wire
    wire.engine.stream.close()
    await wire.server.close()


async def test_server_reports_pending_bytes_to_ranks(wire: Wire) -> None:
    """Once per piece of bytes."""
    for pieces, frame in ((1, b"order"), (3, b"entry")):
        wire.home.link.sent.clear()
        wire.engine.stream.put_range(ByteRange(0, pieces * PIECE_BYTES))
        wire.engine.stream.put(ToRank("encode", 0, frame))
        wire.deliver()
        assert wire.home.link.sent[0] == [*[ON_THE_WAY] * pieces, frame]


async def test_server_lets_pulses_go_ahead_of_rows(wire: Wire) -> None:
    """Rows fill the window and wait; the engine still learns that the rank is alive."""
    report, received = wire.home.link.on_frame, wire.engine.received
    wire.engine.stream.put(Fetch("encode", 1, [ByteRange(0, 2 * WINDOW_BYTES)]))
    wire.reach_server()
    received.clear()
    report(FIRST, encode_report(EncodeResult(1, None, 0)))
    pulse = FromRank("encode", pulse_identity(0), encode_report(Pulse()))
    report(pulse.identity, pulse.frame)
    wire.deliver()
    kinds = [type(one) for one in received]
    assert received.count(pulse) == 1
    behind = kinds[received.index(pulse) :].count(Write)
    assert behind * PIECE_BYTES >= WINDOW_BYTES
    assert kinds[-2:] == [Fetched, FromRank], "its result comes after its rows"


@pytest.mark.parametrize(("failure", "rows"), [(None, 1), (EncodeErrorKind.OUT_OF_MEMORY, 0)])
async def test_rows_precede_results(wire: Wire, failure: EncodeErrorKind | None, rows: int) -> None:
    """Each step's rows precede its result; a failed step has none."""
    for step in (1, 2):
        wire.engine.stream.put(Fetch("encode", step, [ByteRange(100 * step, 8)]))
    wire.deliver()
    for step in (1, 2):
        wire.engine.received.clear()
        wire.home.link.on_frame(FIRST, encode_report(EncodeResult(step, failure, 0)))
        wire.deliver()
        *written, fetched, result = wire.engine.received
        assert [one for one in written if isinstance(one, Write)] == [
            Write(100 * step, bytes(8))
        ] * rows
        assert fetched == Fetched("encode", step)
        assert isinstance(result, FromRank)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), zmq.ZMQError(24, "Too many files")]
)
async def test_server_refuses_when_full(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Its engine would wait for `cluster.connect_s`."""
    monkeypatch.setattr(Home, "open_link", Mock(side_effect=error))
    wire = Wire()
    assert wire.engine.received == [Refused(f"has no room: {error}")]
    await asyncio.gather(*wire.server.ending)
    assert not wire.server.starts


@pytest.mark.parametrize("over", [False, True])
async def test_closing_server_waits_for_ranks_and_opens_no_start(wire: Wire, *, over: bool) -> None:
    """Also for ranks of starts that are over.

    An engine may reconnect while ranks are ending; nothing would end the ranks that it starts then.
    """
    wire.home.rank.may_end.clear()
    if over:
        wire.engine.stream.put(Bye())
        wire.deliver()
    closing = asyncio.create_task(wire.server.close())
    await asyncio.sleep(0)
    wire.server.receive(b"another peer", wire.opening)
    assert not closing.done()
    wire.home.rank.may_end.set()
    await closing
    assert (wire.home.rank.ended, wire.home.places) == (True, 1)


@pytest.mark.parametrize(("cores", "threads"), [(None, 4), (6, 2)])
async def test_server_limits_a_rank_by_its_own_host(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, threads: int
) -> None:
    """Defaults come from the host that starts a rank, or from its bundle of Ray, not from the engine's host."""
    monkeypatch.setattr(server, "host_available", lambda: 400 << 30)
    pretend_cores(monkeypatch, 12)
    share = HostShare(processes=3, threads=("encode",), memory=1, memory_bytes=1 << 30)
    wire = Wire(msgspec.structs.replace(SPEC, share=share), cores)
    assert wire.home.launched == [(threads, 51 << 30)]
    wire.engine.stream.close()
    await wire.server.close()


async def test_server_gives_memory_of_a_start_back_at_its_end(wire: Wire) -> None:
    """At once: the next start on this host has an arena of its own, and a collection of garbage may be far away."""

    def arenas() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:vsched-arena")

    before, descriptors = arenas(), len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        wire.engine.stream.put(Bye())
        wire.deliver()
        await asyncio.gather(*wire.server.ending)
        assert arenas() == before - 1
        both = 2  # the descriptor of the arena, and its duplicate in the mapping
        assert len(os.listdir("/proc/self/fd")) == descriptors - both
    finally:
        gc.enable()
