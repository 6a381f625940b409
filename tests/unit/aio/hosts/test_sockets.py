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
from vsched.aio.hosts.keys import (
    CurveKeys,
    PlainKeys,
    curve_keys,
    make_secret,
    read_key_file,
    write_key_file,
)
from vsched.aio.hosts.sockets import Context, EngineSocket, HostSocket
from vsched.errors import ConfigError

SHARED = make_secret()


class Heard:
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
async def host() -> AsyncIterator[Heard]:
    host = Heard()
    yield host
    host.close()


@pytest.fixture
async def context() -> AsyncIterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


async def test_sockets_carry_frames_of_who_has_the_key(host: Heard, context: Context) -> None:
    heard: list[bytes] = []
    cut: list[str] = []
    keys = curve_keys(SHARED, "engine")
    engine = EngineSocket(context, host.link.address, keys, heard.append, cut.append)
    for index in range(100):
        assert engine.send(b"%d" % index)
    await until(lambda: len(heard) == 100)
    assert heard == host.frames == [b"%d" % index for index in range(100)]
    host.link.close()
    await until(lambda: cut)
    assert cut == ["closed the connection"]
    engine.close()


async def test_sockets_let_nobody_in_without_the_key(host: Heard, context: Context) -> None:
    """Another secret, only the host's key, or no CURVE at all."""
    other = curve_keys(make_secret(), "engine")
    known_server = other._replace(peer=curve_keys(SHARED, "engine").peer)
    heard: list[bytes] = []
    cut: list[str] = []
    strangers = [
        EngineSocket(context, host.link.address, keys, heard.append, cut.append)
        for keys in (other, known_server)
    ]
    plain = context.socket(zmq.DEALER)
    plain.connect(host.link.address)
    plain.send(b"let me in", zmq.DONTWAIT)
    for stranger in strangers:
        stranger.send(b"let me in")
    await until(lambda: cut and strangers[0].hung_up)
    keys = curve_keys(SHARED, "engine")
    engine = EngineSocket(context, host.link.address, keys, heard.append, cut.append)
    engine.send(b"me")
    await until(lambda: heard)
    await asyncio.sleep(0)
    assert host.frames == heard == [b"me"]
    assert "does not take the key" in cut[0]
    for socket in (*strangers, engine):
        socket.close()
    plain.close(linger=0)


async def test_plain_entrance_lets_in_who_has_the_password(host: Heard, context: Context) -> None:
    """Another password, name or key, no engine secret, or no credentials."""
    plain = host.link.plain()
    assert plain is host.link.plain()
    heard: list[bytes] = []
    cut: list[str] = []
    name, password = zmq.curve_keypair()
    curved, secret = zmq.curve_keypair()
    taken: list[bytes] = []

    def take(peer: bytes, frame: bytes) -> None:
        taken.append(frame)
        plain.send(peer, frame)

    plain.admit(name, take)
    host.link.admit(curved, lambda _peer, frame: taken.append(frame))
    engine = curve_keys(SHARED, "engine")
    strangers = [
        EngineSocket(context, plain.address, keys, heard.append, cut.append)
        for keys in (
            PlainKeys(name, secret),
            PlainKeys(name, b"no key"),
            PlainKeys(name, b" "),
            PlainKeys(name, name),
            PlainKeys(curved, secret),
            PlainKeys(*zmq.curve_keypair()),
            PlainKeys(engine.public, engine.secret),
            engine,
            CurveKeys(name, password, engine.peer),
        )
    ]
    elsewhere = EngineSocket(
        context, host.link.address, PlainKeys(name, password), heard.append, cut.append
    )
    wordless = context.socket(zmq.DEALER)
    wordless.connect(plain.address)
    wordless.send(b"let me in", zmq.DONTWAIT)
    for stranger in (*strangers, elsewhere):
        stranger.send(b"let me in")
    encrypting = strangers[-2:]
    await until(lambda: taken or (len(cut) >= 7 and all(one.hung_up for one in encrypting)))
    assert not taken
    friend = EngineSocket(
        context, plain.address, PlainKeys(name, password), heard.append, cut.append
    )
    friend.send(b"me")
    await until(lambda: heard)
    await asyncio.sleep(0)
    assert taken == heard == [b"me"]
    assert host.frames == []
    host.link.dismiss(name)
    friend.send(b"still me")
    late = EngineSocket(context, plain.address, PlainKeys(name, password), heard.append, cut.append)
    late.send(b"and me")
    before = len(cut)
    await until(lambda: len(cut) > before)
    assert taken == [b"me"]
    for socket in (*strangers, elsewhere, friend, late):
        socket.close()
    wordless.close(linger=0)


@pytest.mark.parametrize("encrypted", [True, False])
async def test_wire_shows_what_is_said_without_encryption_alone(
    host: Heard, context: Context, encrypted: bool
) -> None:
    """Only traffic of the plain entrance can be read on the wire."""
    heard: list[bytes] = []
    public, secret = zmq.curve_keypair()
    entrance = host.link if encrypted else host.link.plain()

    def answer(peer: bytes, _frame: bytes) -> None:
        entrance.send(peer, b"rows " * 20)

    entrance.admit(public, answer)
    keys = (
        CurveKeys(public, secret, curve_keys(SHARED, "engine").peer)
        if encrypted
        else PlainKeys(public, secret)
    )
    async with Cable(entrance.address) as cable:
        cable.read = bytearray()
        peer = EngineSocket(context, cable.address, keys, heard.append, heard.append)  # type: ignore[arg-type]
        peer.send(b"what is in the picture?")
        await until(lambda: heard)
        peer.close()
    assert heard == [b"rows " * 20]
    assert (b"what is in the picture?" in cable.read) == (heard[0] in cable.read) != encrypted


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


def test_keys_of_the_two_sides_fit() -> None:
    engine, host = curve_keys(SHARED, "engine"), curve_keys(SHARED, "host")
    assert (engine.peer, host.peer) == (host.public, engine.public)
    assert engine.secret != host.secret
