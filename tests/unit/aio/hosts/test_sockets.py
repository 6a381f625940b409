"""Peers without the key can neither send nor receive."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from tests.cable import Cable
from tests.patience import until
from vsched.aio.hosts.link import (
    Context,
    CurveKeys,
    EngineSocket,
    HostSocket,
    curve_keys,
    make_secret,
    read_key_file,
    write_key_file,
)
from vsched.errors import ConfigError

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


@pytest.fixture
async def context() -> AsyncIterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


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
