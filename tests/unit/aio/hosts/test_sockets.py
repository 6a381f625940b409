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
    EngineSocket,
    HostSocket,
    curve_keys,
    make_secret,
    read_key_file,
    write_key_file,
)
from vsched.errors import ConfigError

SHARED = make_secret()


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
    received: list[bytes] = []
    cut: list[str] = []
    keys = curve_keys(SHARED, "engine")
    engine = EngineSocket(context, host.link.address, keys, received.append, cut.append)
    for index in range(100):
        assert engine.send(b"%d" % index)
    await until(lambda: len(received) == 100)
    assert received == host.frames == [b"%d" % index for index in range(100)]
    host.link.close()
    await until(lambda: cut)
    assert cut == ["closed the connection"]
    engine.close()


async def test_sockets_refuse_peers_without_the_key(host: Received, context: Context) -> None:
    """Another secret, only the host's key, or no CURVE at all."""
    other = curve_keys(make_secret(), "engine")
    known_server = other._replace(peer=curve_keys(SHARED, "engine").peer)
    received: list[bytes] = []
    cut: list[str] = []
    strangers = [
        EngineSocket(context, host.link.address, keys, received.append, cut.append)
        for keys in (other, known_server)
    ]
    plain = context.socket(zmq.DEALER)
    plain.connect(host.link.address)
    plain.send(b"let me in", zmq.DONTWAIT)
    for stranger in strangers:
        stranger.send(b"let me in")
    await until(lambda: cut)
    keys = curve_keys(SHARED, "engine")
    engine = EngineSocket(context, host.link.address, keys, received.append, cut.append)
    engine.send(b"me")
    await until(lambda: received)
    await asyncio.sleep(0)
    assert host.frames == received == [b"me"]
    assert "does not take the key" in cut[0]
    for socket in (*strangers, engine):
        socket.close()
    plain.close(linger=0)


async def test_wire_shows_nothing_of_what_is_sent(host: Received, context: Context) -> None:
    received: list[bytes] = []
    cut: list[str] = []
    async with Cable(host.link.address) as cable:
        cable.read = bytearray()
        keys = curve_keys(SHARED, "engine")
        engine = EngineSocket(context, cable.address, keys, received.append, cut.append)
        engine.send(b"what is in the picture? " * 4)
        await until(lambda: received)
        engine.close()
    assert received == host.frames == [b"what is in the picture? " * 4]
    assert cable.read
    assert b"picture" not in cable.read


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
