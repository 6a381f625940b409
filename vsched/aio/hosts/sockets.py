"""The ends of links between engine and hosts: ZeroMQ over TCP, encrypted with CURVE.

A host binds one ROUTER socket, on which each start of a worker group of any engine is one peer; an engine connects one
DEALER per start. A peer without the key is rejected during the handshake. A broken connection is never resumed, because
it is unknown which frames were lost: its start has ended.

ZeroMQ's queues are unlimited here; `Stream` never has more than its window in flight.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from vsched.errors import ConfigError
from vsched.wire import FRAME_BYTES_MAX

SECRET_BYTES = 32
DOMAIN = b"vsched"


class CurveKeys(NamedTuple):
    """One side's key pair and the other side's public key, in ZeroMQ's Z85 format."""

    public: bytes
    secret: bytes
    peer: bytes


def curve_keys(shared: bytes, side: Literal["engine", "host"]) -> CurveKeys:
    """Return the keys of one side of the link.

    Raises:
        ConfigError: When ZeroMQ was built without CURVE.
    """
    if not zmq.has("curve"):
        raise ConfigError(
            "cluster: this build of ZeroMQ has no CURVE, and nothing is sent to other hosts in the clear. "
            "Remedy: install pyzmq from a wheel of PyPI, which has it"
        )
    other = "host" if side == "engine" else "engine"
    secret = _secret_of(shared, side)
    return CurveKeys(zmq.curve_public(secret), secret, zmq.curve_public(_secret_of(shared, other)))


def _secret_of(shared: bytes, side: str) -> bytes:
    return z85.encode(blake2b(side.encode(), key=shared, digest_size=32).digest())


def make_secret() -> bytes:
    """Return a new secret."""
    return secrets.token_bytes(SECRET_BYTES)


def write_key_file(path: Path) -> None:
    """Write a new secret to a file that only its owner can read.

    Raises:
        ConfigError: When the file exists or cannot be written.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{path}: no key written: {error.strerror}. Remedy: name a new file"
        ) from (error)
    with os.fdopen(file, "w") as out:
        out.write(f"{make_secret().hex()}\n")


def read_key_file(path: str, *, key: str) -> bytes:
    """Return the secret in the file at `path`; `key` is the configuration key for error messages.

    Raises:
        ConfigError: When the file cannot be read, contains no key, or is readable by others.
    """
    remedy = "Remedy: make one with `vsched host --make-key FILE`, and copy it to every host"
    try:
        with open(path, encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            shared = bytes.fromhex(file.read())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path!r} is no key file: {error}. {remedy}") from error
    if len(shared) != SECRET_BYTES:
        raise ConfigError(
            f"{key}: {path!r} has {len(shared)} bytes, a key has {SECRET_BYTES}. {remedy}"
        )
    if mode & 0o077:
        raise ConfigError(f"{key}: others may read {path!r}. Remedy: chmod 600 {path}")
    return shared


logger = logging.getLogger(__name__)
Context = zmq.Context[zmq.Socket[bytes]]
LINGER_MS = 200
"""Time for queued frames to be sent when a socket is closed."""
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class _Readable:
    """Reads a socket when its descriptor becomes readable, and after each send, as `LeaderLink` does."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[], None]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._due = self.closed = False
        self._loop.add_reader(self._fd, self.read)
        self.sent()  # the descriptor does not signal before EVENTS is read once

    def sent(self) -> None:
        """Check for messages after a send, which may have consumed the edge of the descriptor."""
        if not self._due and not self.closed and self._readable():
            self._due = True
            self._loop.call_soon(self.read)

    def _readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def read(self) -> None:
        """Handle all messages that have arrived."""
        self._due = False
        while not self.closed and self._readable():
            self._take()

    def close(self, linger_ms: int) -> None:
        """Stop reading and close the socket."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)


class EngineSocket:
    """An engine's end of the link to a host, for one start of a worker group.

    `on_frame` gets the host's frames. `on_cut` gets a description when an established connection breaks, or when the
    host rejects the key; a host that is not reachable yet is waited for.

    Attributes:
        hung_up: Number of connections that the host closed during the handshake: it may have another key.
    """

    def __init__(
        self,
        context: Context,
        address: str,
        keys: CurveKeys,
        on_frame: Callable[[bytes], None],
        on_cut: Callable[[str], None],
    ) -> None:
        self._on_frame = on_frame
        self._on_cut = on_cut
        self._greeted = False
        self.hung_up = 0
        socket = self._socket = context.socket(zmq.DEALER)
        _limit(socket)
        socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(16))
        socket.curve_serverkey = keys.peer
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._watching = _Readable(self._monitor, self._see)
        socket.connect(address)
        self._receiving = _Readable(socket, self._receive)

    def send(self, frame: bytes) -> bool:
        """Queue a frame, without waiting; return False if that fails."""
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        self._receiving.sent()
        return True

    def read(self) -> None:
        """Handle all frames that have arrived."""
        self._receiving.read()

    def _receive(self) -> None:
        self._on_frame(self._socket.recv(zmq.DONTWAIT))

    def _see(self) -> None:
        """Handle an event of the connection."""
        event = recv_monitor_message(self._monitor, zmq.DONTWAIT)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greeted = True
        elif event == zmq.EVENT_DISCONNECTED and self._greeted:
            self._receiving.read()  # frames sent before it closed
            self._on_cut("closed the connection")
        elif event == zmq.EVENT_DISCONNECTED:
            self.hung_up += 1
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self._on_cut("does not take the key. Remedy: give engine and hosts the same key file")

    def close(self) -> None:
        """Close, after up to `LINGER_MS` for queued frames."""
        if not self._receiving.closed:
            self._socket.disable_monitor()
            self._watching.close(0)
            self._receiving.close(LINGER_MS)


class HostSocket:
    """The host's end: one socket for all peers that have the key.

    Attributes:
        address: Address to which it is bound.
    """

    def __init__(
        self,
        context: Context,
        address: str,
        keys: CurveKeys,
        on_frame: Callable[[bytes, bytes], None],
    ) -> None:
        """Bind; `on_frame` gets the identity of a peer, which is new for each start, and its frame.

        Raises:
            zmq.ZMQError: When the address cannot be bound.
        """
        self._on_frame = on_frame
        self._peer_key = keys.peer
        self._gate = context.socket(zmq.REP)
        self._gate.bind(_ZAP_ADDRESS)
        self._gating = _Readable(self._gate, self._authenticate)
        socket = self._socket = context.socket(zmq.ROUTER)
        _limit(socket)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        try:
            socket.bind(address)
        except BaseException:
            socket.close(linger=0)
            self._gating.close(0)
            raise
        self.address = str(socket.get_string(zmq.LAST_ENDPOINT))
        self._receiving = _Readable(socket, self._receive)

    def _authenticate(self) -> None:
        """Accept a peer that proved to have the key (ZeroMQ's RFC 27)."""
        version, number, _, address, _, mechanism, *credentials = self._gate.recv_multipart()
        known = mechanism == b"CURVE" and zmq.utils.z85.encode(credentials[0]) == self._peer_key
        if not known:
            logger.warning("a peer at %s without the key was turned away", address.decode())
        status = (b"200", b"") if known else (b"400", b"unknown key")
        self._gate.send_multipart([version, number, *status, b"", b""])
        self._gating.sent()

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Queue a frame for a peer, without waiting; return False when it is gone."""
        try:
            self._socket.send_multipart([identity, frame], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        self._receiving.sent()
        return True

    def read(self) -> None:
        """Handle all frames that have arrived."""
        self._receiving.read()

    def _receive(self) -> None:
        identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
        if len(frames) == 1:
            self._on_frame(identity, frames[0])

    def close(self) -> None:
        """Close, after up to `LINGER_MS` for queued frames."""
        self._receiving.close(LINGER_MS)
        self._gating.close(0)


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
