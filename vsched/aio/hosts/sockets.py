"""The ends of the links between hosts: ZeroMQ over TCP, under CURVE.

A host binds one ROUTER socket, on which every engine's every start of a worker group is a peer of its own; an engine
connects a DEALER for each start. A peer that does not have the key is let go before it can say a word. A connection
that breaks is never mended: what was on its way is unknown, so the start that it belonged to is over.

Where an engine wants the ways between hosts without encryption, those that fetch rows come to a second socket, by
ZeroMQ's PLAIN: the same gate asks them for a password. No engine is let in there.

ZeroMQ would queue without limit here; `Stream` never has more than its window under way.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from vsched.aio.hosts.keys import DOMAIN, CurveKeys, PlainKeys
from vsched.wire import FRAME_BYTES_MAX

logger = logging.getLogger(__name__)
Context = zmq.Context[zmq.Socket[bytes]]
LINGER_MS = 200
"""How long a last word may take to leave when a socket is closed."""
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
    """Has a socket drained whenever the loop sees that something changed, and after each send, as `LeaderLink`."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[], None]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._due = self.closed = False
        self._loop.add_reader(self._fd, self.read)
        self.sent()  # the descriptor tells nothing before it was asked once

    def sent(self) -> None:
        """Sending may have swallowed the edge that announced a message."""
        if not self._due and not self.closed and self._readable():
            self._due = True
            self._loop.call_soon(self.read)

    def _readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def read(self) -> None:
        """Take everything that has come."""
        self._due = False
        while not self.closed and self._readable():
            self._take()

    def close(self, linger_ms: int) -> None:
        """Stop listening, and close the socket."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)


class EngineSocket:
    """An engine's end of the link to one host, for one start of a worker group; or that of a host that fetches rows.

    Attributes:
        address: Where the host is, and `host_key` the public key that it has; it has none where nothing is encrypted.
        hung_up: How often the host let the connection go before it was greeted: it may have another key.

    `on_frame` gets what the host says. `on_cut` is called when the connection breaks that was there, or the host does
    not take the key, with what happened in words; a host that is not there yet is waited for.
    """

    def __init__(
        self,
        context: Context,
        address: str,
        keys: CurveKeys | PlainKeys,
        on_frame: Callable[[bytes], None],
        on_cut: Callable[[str], None],
    ) -> None:
        self.address, self.host_key = address, b""
        self._on_frame = on_frame
        self._on_cut = on_cut
        self._greeted = False
        self.hung_up = 0
        socket = self._socket = context.socket(zmq.DEALER)
        _limit(socket)
        socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(16))
        if isinstance(keys, CurveKeys):
            self.host_key = socket.curve_serverkey = keys.peer
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        else:
            socket.setsockopt(zmq.PLAIN_USERNAME, keys.public)
            socket.setsockopt(zmq.PLAIN_PASSWORD, keys.secret)
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._watching = _Readable(self._monitor, self._see)
        socket.connect(address)
        self._hearing = _Readable(socket, self._hear)

    def send(self, frame: bytes) -> bool:
        """Queue a frame, never waiting."""
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        self._hearing.sent()
        return True

    def read(self) -> None:
        """Take everything that has come."""
        self._hearing.read()

    def _hear(self) -> None:
        self._on_frame(self._socket.recv(zmq.DONTWAIT))

    def _see(self) -> None:
        """Look at what became of the connection."""
        event = recv_monitor_message(self._monitor, zmq.DONTWAIT)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greeted = True
        elif event == zmq.EVENT_DISCONNECTED and self._greeted:
            self._hearing.read()  # its last words
            self._on_cut("closed the connection")
        elif event == zmq.EVENT_DISCONNECTED:
            self.hung_up += 1
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self._on_cut("does not take the key. Remedy: give engine and hosts the same key file")

    def close(self) -> None:
        """Say what is queued, within a moment, and close."""
        if not self._hearing.closed:
            self._socket.disable_monitor()
            self._watching.close(0)
            self._hearing.close(LINGER_MS)


class Entrance:
    """A port of a host: every peer that was admitted, by an identity that it chose for one start.

    Attributes:
        address: Where it is.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Bind a socket that knows how peers prove who they are; what they say is asked of the gate of its context."""
        self._admitted: dict[bytes, Callable[[bytes, bytes], None]] = {}
        self._socket = socket
        _limit(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        try:
            socket.bind(address)
        except BaseException:
            socket.close(linger=0)
            raise
        self.address = str(socket.get_string(zmq.LAST_ENDPOINT))
        self._hearing = _Readable(socket, self._hear)

    @property
    def port(self) -> int:
        """Its number."""
        return int(self.address.rpartition(":")[2])

    def admit(self, key: bytes, on_frame: Callable[[bytes, bytes], None]) -> None:
        """Let a peer with another key in, too: what it says goes to `on_frame`, and to nobody else."""
        self._admitted[key] = on_frame

    def dismiss(self, key: bytes) -> None:
        """Hear no peer with this key any more."""
        self._admitted.pop(key, None)

    def knows(self, key: bytes) -> bool:
        """Return whether a peer with this key may come."""
        return key in self._admitted

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Queue a frame for a peer, never waiting; return False when it is gone."""
        try:
            self._socket.send_multipart([identity, frame], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        self._hearing.sent()
        return True

    def read(self) -> None:
        """Take everything that has come."""
        self._hearing.read()

    def _hear(self) -> None:
        identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        hear = self._admitted.get(str(frames[0].get("User-Id")).encode()) if frames else None
        if hear is not None and len(frames) == 1:
            hear(identity.bytes, frames[0].bytes)

    def close(self) -> None:
        """Say what is queued, within a moment, and close."""
        self._hearing.close(LINGER_MS)


class HostSocket(Entrance):
    """The host's end: every peer that has the key, and with `plain` an entrance where nothing is encrypted."""

    def __init__(
        self,
        context: Context,
        address: str,
        keys: CurveKeys,
        on_frame: Callable[[bytes, bytes], None],
    ) -> None:
        """Bind; `on_frame` gets the identity of a peer, and what it says."""
        self._context = context
        self._plain: Entrance | None = None
        self._gate = context.socket(zmq.REP)
        self._gate.bind(_ZAP_ADDRESS)
        self._gating = _Readable(self._gate, self._let_in)
        socket = context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        try:
            super().__init__(socket, address)
        except BaseException:
            self._gating.close(0)
            raise
        self.admit(keys.peer, on_frame)

    def plain(self) -> Entrance:
        """Return the entrance without encryption, on a port that the system chooses: bound when first asked for.

        Raises:
            zmq.ZMQError: When there is no port.
        """
        if self._plain is None:
            socket = self._context.socket(zmq.ROUTER)
            socket.plain_server = True
            self._plain = Entrance(socket, f"{self.address.rpartition(':')[0]}:*")
        return self._plain

    def _let_in(self) -> None:
        """Let a peer in that proved to have a key of the entrance that it came to (ZeroMQ's RFC 27)."""
        version, number, _, address, _, mechanism, *credentials = self._gate.recv_multipart()
        key, known = b"", False
        if mechanism == b"CURVE":
            key = zmq.utils.z85.encode(credentials[0])
            known = self.knows(key)
        elif mechanism == b"PLAIN" and self._plain is not None:
            said = PlainKeys(*credentials)
            known = self._plain.knows(said.public) and said.fit
            key = said.public if known else b""
        if not known:
            logger.warning("a peer at %s without the key was turned away", address.decode())
        status = (b"200", b"") if known else (b"400", b"unknown key")
        self._gate.send_multipart([version, number, *status, key, b""])
        self._gating.sent()

    def dismiss(self, key: bytes) -> None:
        """Hear no peer with this key any more, wherever it came in."""
        super().dismiss(key)
        if self._plain is not None:
            self._plain.dismiss(key)

    def reach(
        self,
        address: str,
        keys: CurveKeys | PlainKeys,
        on_frame: Callable[[bytes], None],
        on_cut: Callable[[str], None],
    ) -> EngineSocket:
        """Connect with another host."""
        return EngineSocket(self._context, address, keys, on_frame, on_cut)

    def close(self) -> None:
        """Say what is queued, within a moment, and close."""
        super().close()
        if self._plain is not None:
            self._plain.close()
        self._gating.close(0)


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
