"""Connections to hosts: peers need the key, and a host that is looked up is found, or lost if it does not answer."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq

from tests.cable import Cable
from tests.patience import NEVER_S, PATIENCE_S, until
from tests.unit.aio.hosts.test_server import SPEC
from tests.unit.aio.hosts.test_stream import Side
from tests.unit.rank.fake_plugin import LAYOUT
from vsched.aio.hosts import remote
from vsched.aio.hosts.link import (
    Connect,
    Context,
    CurveKeys,
    EngineSocket,
    HostSocket,
    Kill,
    Opened,
    OpenGroups,
    curve_keys,
    make_secret,
    read_key_file,
    write_key_file,
)
from vsched.aio.hosts.remote import RemoteHost
from vsched.config.sections import DeadlinesConfig
from vsched.errors import ConfigError
from vsched.transport.arena import Arena

SHARED = make_secret()
KEYS = curve_keys(SHARED, "engine")


class Received:
    """A host that echoes, and the messages it received."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.context: Context = zmq.Context()
        keys = curve_keys(SHARED, "host")
        self.link = HostSocket(self.context, "tcp://127.0.0.2:*", keys, self._take)

    def _take(self, peer: bytes, frame: bytes) -> None:
        self.frames.append(frame)
        self.link.send(peer, frame)

    def close(self) -> None:
        self.link.close()
        self.context.destroy(linger=0)


class Sending:
    """An engine's socket, the messages it received, and why it was cut."""

    def __init__(self, context: Context, address: str, keys: CurveKeys = KEYS) -> None:
        self.received: list[bytes] = []
        self.cut: list[str] = []
        self.socket = EngineSocket(context, address, keys, self.received.append, self.cut.append)


@pytest.fixture
async def host() -> AsyncIterator[Received]:
    host = Received()
    yield host
    host.close()


async def test_sockets_carry_frames_of_peers_with_the_key(host: Received, context: Context) -> None:
    """The bytes on the wire are encrypted."""
    async with Cable(host.link.address) as cable:
        cable.read = bytearray()
        engine = Sending(context, cable.address)
        frames = [b"what is in picture %d? " % index for index in range(100)]
        for frame in frames:
            assert engine.socket.send(frame)
        await until(lambda: len(engine.received) == 100)
        assert engine.received == host.frames == frames
        assert cable.read
        assert b"picture" not in cable.read
        host.link.close()
        await until(lambda: engine.cut)
        assert engine.cut == ["closed the connection"]
        engine.socket.close()


async def test_sockets_refuse_peers_without_the_key(host: Received, context: Context) -> None:
    """Another secret, only the host's key, or no CURVE at all."""
    other = curve_keys(make_secret(), "engine")
    known_server = other._replace(peer=KEYS.peer)
    strangers = [Sending(context, host.link.address, keys) for keys in (other, known_server)]
    plain = context.socket(zmq.DEALER)
    plain.connect(host.link.address)
    plain.send(b"let me in", zmq.DONTWAIT)
    for stranger in strangers:
        stranger.socket.send(b"let me in")
    await until(lambda: strangers[1].cut)
    engine = Sending(context, host.link.address)
    engine.socket.send(b"me")
    await until(lambda: engine.received)
    await asyncio.sleep(0)
    assert host.frames == engine.received == [b"me"]
    assert not any(stranger.received for stranger in strangers)
    assert "does not take the key" in strangers[1].cut[0]
    for one in (*strangers, engine):
        one.socket.close()
    plain.close(linger=0)


def test_key_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_key_file(str(path), key="cluster.key_file")) == 32
    with pytest.raises(ConfigError, match="name a new file"):
        write_key_file(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        read_key_file(str(path), key="cluster.key_file")


@pytest.mark.parametrize("text", ["", "no hex", "ab" * 31])
def test_key_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"^cluster\.key_file: .*make-key"):
        read_key_file(str(path), key="cluster.key_file")


class End:
    """A connection to an address that sends nothing by itself."""

    def __init__(
        self, address: str, say: Callable[[bytes], None], cut: Callable[[str], None], *, takes: bool
    ) -> None:
        self.address, self.say, self.cut = address, say, cut
        self.frames: list[bytes] = []
        self.reads = 0
        self.takes = takes

    def send(self, frame: bytes) -> bool:
        self.frames.append(frame)
        return self.takes

    def read(self) -> None:
        self.reads += 1

    def close(self) -> None:
        """No-op."""


class Search:
    """A host that is looked up; `takes` is whether its links take frames."""

    def __init__(self) -> None:
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ends: list[End] = []
        self.losses: list[str] = []
        self.on_open = Mock()
        self.takes = True
        self.arena = Arena.create(LAYOUT)
        self.host = RemoteHost(
            "ray generate-0",
            (self.find, self.connect_to),
            engine="engine",
            groups=["generate-0"],
            arena=self.arena,
            deadlines=DeadlinesConfig(),
            open_s=0.0,
            on_open=self.on_open,
            on_lost=self.losses.append,
        )

    async def find(self) -> str:
        return await asyncio.shield(self.address)

    def connect_to(self, address: str) -> Connect:
        def connect(say: Callable[[bytes], None], cut: Callable[[str], None]) -> End:
            self.ends.append(End(address, say, cut, takes=self.takes))
            return self.ends[-1]

        return connect

    async def found(self) -> End:
        self.address.set_result("there")
        await until(lambda: self.ends)
        return self.ends[0]

    def answer(self, end: End) -> None:
        there = Side()
        there.stream.put(Opened())
        end.say(there.frames[0])


@pytest.fixture
async def seen() -> AsyncIterator[Search]:
    seen = Search()
    yield seen
    seen.host.close()
    seen.arena.close()


async def test_sought_host_hears_everything_once_it_is_found(seen: Search) -> None:
    """Messages arrive in order, in both directions."""
    seen.host.read()
    await asyncio.sleep(0)
    assert not seen.ends
    end = await seen.found()
    seen.host.stream.put(Kill(0))
    there = Side()
    for frame in end.frames:
        there.stream.receive(frame)
    assert end.address == "there"
    assert [type(one) for one in there.received] == [OpenGroups, Kill]
    seen.host.read()
    assert end.reads == 1
    seen.answer(end)
    seen.on_open.assert_called_once()


@pytest.mark.parametrize("answers", [True, False])
async def test_sought_host_must_answer_once_it_is_found(
    seen: Search, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    """It may have moved meanwhile: the loss has it looked up again."""
    monkeypatch.setattr(remote, "ANSWER_S", 60.0 if answers else 0.01)
    end = await seen.found()
    if answers:
        seen.answer(end)
        assert seen.host._opening is not None
        assert seen.host._opening.cancelled()
        end.cut("closed the connection")
    await until(lambda: seen.losses)
    expected = "closed the connection" if answers else "did not answer for 0.01 s at there"
    assert seen.losses == [expected]


@pytest.mark.parametrize("moved", [False, True])
async def test_sought_host_is_lost_that_will_never_be_or_moved(
    seen: Search, *, moved: bool
) -> None:
    """One that has moved lacks the missed frames."""
    seen.takes = False
    if moved:
        seen.address.set_result("there")
    else:
        seen.address.set_exception(ConfigError("there is no room"))
    await until(lambda: seen.losses)
    assert seen.losses == ["cannot be reached" if moved else "was not found: there is no room"]
    assert bool(seen.ends) is moved


async def test_sought_host_is_looked_for_until_the_start_is_over(seen: Search) -> None:
    """A rank that it was to start has not been started, so nothing is waited for."""
    exits: list[int] = []
    rank = seen.host.launch(SPEC, exits.append)
    await asyncio.wait_for(rank.wait_exit(grace_s=NEVER_S), PATIENCE_S)
    assert (seen.losses, len(exits)) == (["has not been found"], 1)
    assert seen.host._seeking is not None
    await until(seen.host._seeking.done)
    assert not seen.ends
