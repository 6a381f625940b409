"""The link between an engine and a host for one start of a worker group: messages, ordered stream, sockets.

Everything travels on one ordered stream: arena bytes before the decision that reads them, and the embedding rows of an
encode batch before its result. Frames of the decision log and reports of ranks are forwarded unchanged; only leader and
rank decode them. No message contains a clock reading, only durations.

Each frame has a number, so that a lost frame ends the stream. At most a window of arena bytes is in flight, in pieces
that are acknowledged. Everything behind them waits here: messages encoded, arena bytes as ranges that are read when
they are sent. So a slow link needs no memory. The bytes of a step are read while it is in flight, when nothing may
overwrite them. The stream is independent of sockets: its owner passes frames in and out.

The sockets are ZeroMQ over TCP, encrypted with CURVE. A host binds one ROUTER socket, on which each start of a worker
group of any engine is one peer; an engine connects one DEALER per start. A peer without the key is rejected during the
handshake. A broken connection is never resumed, because it is unknown which frames were lost: its start has ended.
ZeroMQ's queues are unlimited here; `Stream` never has more bytes of the arena than its window in flight.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from vsched.errors import ConfigError
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import SocketReader
from vsched.types import ArenaLayout
from vsched.wire import FRAME_BYTES_MAX
from vsched.worker.spec import RankSpec

VERSION = version("vsched")
"""Engine and hosts must have the same version: there is one format of a rank's specification."""


class ByteRange(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the arena, by offset from its start."""

    offset: int
    size: int


class OpenGroups(msgspec.Struct, frozen=True, tag=True):
    """The engine's first message: groups to serve, and the arena that their ranks expect.

    Each side sends something every `alive_s`, and gives the other up when it receives nothing for `silence_s`.
    """

    version: str
    engine: str
    groups: list[str]
    layout: ArenaLayout
    alive_s: float
    silence_s: float


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Start a rank; the receiving host fills in the open parts of its specification."""

    spec: RankSpec


class ToRank(msgspec.Struct, frozen=True, tag=True):
    """Forward an entry of a group's decision log to a rank."""

    group: str
    rank: int
    frame: bytes


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Send these bytes of the arena when a step of a group succeeds, before its result."""

    group: str
    step: int
    ranges: list[ByteRange]


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill a rank at once."""

    rank: int


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The engine's last message: kill all ranks that still run."""


class Write(msgspec.Struct, frozen=True, tag=True):
    """Bytes for the other side's arena."""

    offset: int
    data: bytes


class Written(msgspec.Struct, frozen=True, tag=True):
    """Acknowledges the oldest `Write`."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of a side with nothing else to send."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The host's first message."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The host's last message: it does not serve these groups, or stops serving them, and why."""

    why: str


class Launched(msgspec.Struct, frozen=True, tag=True):
    """A rank's process id on its host."""

    rank: int
    pid: int


class FromRank(msgspec.Struct, frozen=True, tag=True):
    """A report of a rank, with the `identity` of its socket."""

    group: str
    identity: bytes
    frame: bytes


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """A step is done: no more of the bytes that were requested with its `Fetch` will come."""

    group: str
    step: int


class Unsent(msgspec.Struct, frozen=True, tag=True):
    """An entry could not be delivered to a rank, which is gone or does not read."""

    group: str
    rank: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A rank's process has ended; a negative code is the signal that killed it."""

    rank: int
    code: int


ToHost = OpenGroups | Launch | ToRank | Fetch | Kill | Bye | Write | Written | Alive
ToEngine = (
    Opened | Refused | Launched | FromRank | Fetched | Unsent | Exited | Write | Written | Alive
)


_HEADER = struct.Struct("<Q")
WINDOW_BYTES = 4 << 20
"""Maximum arena bytes in flight in one direction; allows 400 MB/s at a round-trip time of 10 ms."""
PIECE_BYTES = 256 << 10
"""Arena bytes are sent in pieces of this size, or of half a window, so that urgent frames can go in between."""
WAITING_MAX = 10_000
"""Maximum number of queued messages and ranges; a peer that is further behind is stuck."""
_encoder = msgspec.msgpack.Encoder()


class Stream:
    """One side of the stream.

    `send` passes a frame to a socket, without waiting, and returns whether it could. `write` gets arena bytes, `take`
    all messages but the stream's own. `on_broken` is called once when the stream fails, with a reason that completes a
    sentence after the name of the peer.

    Attributes:
        broken: Whether it has failed or was closed.
    """

    def __init__(
        self,
        messages: Any,
        arena: Arena | None,
        *,
        send: Callable[[bytes], bool],
        take: Callable[[Any], None],
        write: Callable[[Write], None],
        on_broken: Callable[[str], None],
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Create one side; `messages` is the type of received messages, and ranges are read from `arena`."""
        self.arena = arena
        self.broken = False
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._send = send
        self._take = take
        self._write = write
        self._on_broken = on_broken
        self._piece_bytes = min(PIECE_BYTES, window_bytes // 2)
        self._pieces_max = window_bytes // self._piece_bytes
        self._waiting: deque[bytes | ByteRange] = deque()
        self._sent = self._received = self._pieces_under_way = 0
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._received_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    # --- sending ---

    def put(self, message: Any) -> bool:
        """Send a message after everything queued before; return False if the queue is full or the stream has failed."""
        if self.broken or len(self._waiting) >= WAITING_MAX:
            return False
        self._waiting.append(_encoder.encode(message))
        self._pump()
        return not self.broken

    def put_ahead(self, message: Any) -> None:
        """Send a message ahead of the queue: a sign of life must not wait for bytes."""
        if not self.broken:
            self._frame(_encoder.encode(message))

    def put_range(self, where: ByteRange) -> None:
        """Queue arena bytes, to be written at the same offset of the peer's arena."""
        if where.size and not self.broken:
            self._waiting.append(where)

    def _pump(self) -> None:
        """Send everything up to the first arena bytes that do not fit into the window."""
        while self._waiting and not self.broken:
            first = self._waiting.popleft()
            if isinstance(first, ByteRange):
                if self._pieces_under_way == self._pieces_max:
                    self._waiting.appendleft(first)
                    return
                self._pieces_under_way += 1
                first = self._piece(first)
            self._frame(first)

    def _piece(self, where: ByteRange) -> bytes:
        assert self.arena is not None, "only a side with an arena sends bytes"
        size = min(where.size, self._piece_bytes)
        if size < where.size:
            self._waiting.appendleft(ByteRange(where.offset + size, where.size - size))
        return _encoder.encode(Write(where.offset, self.arena.copy(where.offset, size)))

    def _frame(self, body: bytes) -> None:
        self._sent += 1
        self._sent_s = self._loop.time()
        if not self._send(_HEADER.pack(self._sent) + body):
            self.fail("cannot be reached any more")

    # --- receiving ---

    def receive(self, frame: bytes) -> None:
        if self.broken:
            return
        self._received_s = self._loop.time()
        try:
            (number,) = _HEADER.unpack_from(frame)
            message = self._decoder.decode(memoryview(frame)[_HEADER.size :])
        except (struct.error, msgspec.DecodeError):
            self.fail("sent a frame that is no message")
            return
        if number != self._received + 1:
            self.fail(f"sent frame {number}, expected {self._received + 1}")
            return
        self._received = number
        if isinstance(message, Write):
            self._write(message)
            self.put_ahead(Written())
        elif isinstance(message, Written):
            self._pieces_under_way = max(self._pieces_under_way - 1, 0)
            self._pump()
        elif not isinstance(message, Alive):
            self._take(message)

    # --- liveness ---

    def watch(self, *, alive_s: float, silence_s: float, look: Callable[[], None]) -> None:
        """From now on send something every `alive_s`, and fail when nothing is received for `silence_s`.

        `look` reads frames that have arrived already: this process may have been suspended itself.
        """
        self._received_s = self._loop.time()

        def tick() -> None:
            if self.broken:
                return
            if self._loop.time() - self._received_s > silence_s:
                look()
            silent_s = self._loop.time() - self._received_s
            if silent_s > silence_s:
                self.fail(f"was silent for {silent_s:.1f} s")
                return
            if self._loop.time() - self._sent_s >= alive_s / 2:
                self.put_ahead(Alive())
            self._timer = self._loop.call_later(alive_s / 2, tick)

        tick()

    def fail(self, why: str) -> None:
        if not self.broken:
            self.close()
            self._on_broken(why)

    def close(self) -> None:
        self.broken = True
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()


class EngineEnd(Protocol):
    """The engine's end of a link; see `vsched.aio.hosts.link.EngineSocket`."""

    def send(self, frame: bytes) -> bool: ...
    def read(self) -> None: ...
    def close(self) -> None: ...


Connect = Callable[[Callable[[bytes], None], Callable[[str], None]], EngineEnd]
"""Opens a link to a host, given a callback for its frames and one for a broken connection."""

ConnectTo = Callable[[str], Connect]
"""Returns a function that opens a link to an address."""

Find = Callable[[], Awaitable[str]]
"""Returns the address of a host once it has one; raises a `VschedError` if it never will."""


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
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class EngineSocket:
    """An engine's end of the link to a host, for one start of a worker group.

    `on_frame` gets the host's frames. `on_cut` gets a description when an established connection breaks, or when the
    host rejects the key; a host that is not reachable yet is waited for.
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
        socket = self._socket = context.socket(zmq.DEALER)
        _limit(socket)
        socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(16))
        socket.curve_serverkey = keys.peer
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._watching = SocketReader(self._monitor, self._see)
        socket.connect(address)
        self._receiving = SocketReader(socket, self._receive)

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        self._receiving.sent()
        return True

    def read(self) -> None:
        self._receiving.read()

    def _receive(self) -> None:
        self._on_frame(self._socket.recv(zmq.DONTWAIT))

    def _see(self) -> None:
        event = recv_monitor_message(self._monitor, zmq.DONTWAIT)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greeted = True
        elif event == zmq.EVENT_DISCONNECTED and self._greeted:
            self._receiving.read()  # frames sent before it closed
            self._on_cut("closed the connection")
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
        self._gating = SocketReader(self._gate, self._authenticate)
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
        self._receiving = SocketReader(socket, self._receive)

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
        try:
            self._socket.send_multipart([identity, frame], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        self._receiving.sent()
        return True

    def read(self) -> None:
        self._receiving.read()

    def _receive(self) -> None:
        identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
        if len(frames) == 1:
            self._on_frame(identity, frames[0])

    def close(self) -> None:
        self._receiving.close(LINGER_MS)
        self._gating.close(0)


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    # A handshake that a broken connection swallowed is tried again after this time, by default after 30 s.
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
