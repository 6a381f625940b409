"""The control plane over ZeroMQ.

The leader binds one ROUTER socket per group and addresses its ranks by identity; a rank connects a DEALER socket. Every
rank has its own bounded queue, so a rank that never reads cannot delay the others: when its queue is full, it is
reported, and the leader gives up the group.

The event loop watches the descriptor of the leader's socket. The descriptor is edge-triggered and signals only that
something changed, so after every event and every send, the socket is drained until it would block.

Rejected: PUB and SUB sockets, which silently drop messages for slow subscribers; `zmq.asyncio`, whose futures cost more
than a step of the kernel and put an `await` between a decision and its effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from vsched.errors import ConfigError
from vsched.wire import FRAME_BYTES_MAX, Hello, LogEntry, Pulse, encode_report

logger = logging.getLogger(__name__)

QUEUE_MAX = 1000
"""Maximum queue length of a rank before it counts as backlogged."""

NAME_CHARACTERS_MAX = 24
"""Reserved length for the name of a socket within its folder."""


_PULSE = b"pulse-"


def make_socket_folder() -> str:
    """Create a folder for sockets that only this user can access.

    Raises:
        ConfigError: If it cannot be created, or its path would be too long for a socket address.
    """
    try:
        folder = tempfile.mkdtemp(prefix="vsched-")  # mkdtemp creates it with mode 0700
    except OSError as error:  # as in a container with a read-only file system
        raise ConfigError(
            f"the folder for sockets cannot be created: {error}. Remedy: set TMPDIR to a writable folder"
        ) from error
    limit = zmq.IPC_PATH_MAX_LEN - NAME_CHARACTERS_MAX
    if len(folder) > limit:
        Path(folder).rmdir()
        raise ConfigError.of_limit(
            "the path of the folder for temporary files is too long to hold sockets",
            value=len(folder),
            limit=f"{limit} characters",
            remedy="set TMPDIR to a folder with a shorter path",
        )
    return folder


def rank_identity(rank: int) -> bytes:
    """Return the socket identity of a rank."""
    return b"rank-%d" % rank


def pulse_identity(rank: int) -> bytes:
    """Return the socket identity of a rank's pulse."""
    return _PULSE + b"%d" % rank


def is_pulse(identity: bytes) -> bool:
    """True if a socket identity belongs to a rank's pulse."""
    return identity.startswith(_PULSE)


OnFrame = Callable[[bytes, bytes], None]
"""Called with the sender's identity and its frame."""


class SocketReader:
    """Reads a socket with `take` when its descriptor becomes readable, and after each send."""

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
        self._due = False
        while not self.closed and self._readable():
            self._take()

    def close(self, linger_ms: int) -> None:
        """Stop reading and close the socket."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)


class LeaderLink:
    """The leader's end of the links to a group's ranks."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, on_frame: OnFrame
    ) -> None:
        self.address = address
        self._on_frame = on_frame
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MAX)
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._socket.bind(address)
        self._reader = SocketReader(self._socket, self._read_frames)
        self.read = self._reader.read

    def carry(self, entry: LogEntry) -> None:
        """No-op: ranks on this host access the arena directly."""

    def send(self, rank: int, frame: bytes) -> bool:
        """Queue a frame for a rank without blocking; return False if the rank is gone or backlogged."""
        socket = self._socket
        try:
            # Takes half the time of `send_multipart`. The first part fails if the message cannot be sent.
            socket.send(rank_identity(rank), zmq.DONTWAIT | zmq.SNDMORE)
            socket.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        self._reader.sent()
        return True

    def _read_frames(self) -> None:
        identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
        if len(frames) == 1:
            try:
                self._on_frame(identity, frames[0])
            except Exception:
                logger.exception("a report could not be handled")

    def close(self) -> None:
        self._reader.close(0)


class RankLink:
    """A rank's end of the link; blocking, because a rank does one thing at a time."""

    def __init__(self, address: str, rank: int) -> None:
        self.address = address
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, rank_identity(rank))
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.RCVHWM, QUEUE_MAX)
        self._timeout_ms = -1
        self.socket.connect(address)

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """Return the next frame, or None on timeout.

        Blocks: up to the timeout.
        """
        timeout_ms = int(timeout_s * 1000) + (timeout_s > 0)
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            self.socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
        try:
            return self.socket.recv()
        except zmq.Again:
            return None

    def send(self, frame: bytes) -> None:
        self.socket.send(frame)

    def close(self) -> None:
        """Send queued reports, for at most half a second, and close."""
        self.socket.close()
        self.context.term()


def wait_readable(links: list[RankLink], timeout_s: float) -> bool:
    """Block until a link has a message; return False on timeout."""
    poller = zmq.Poller()
    for link in links:
        poller.register(link.socket, zmq.POLLIN)
    return bool(poller.poll(int(timeout_s * 1000) + 1))


_STACK_BYTES = 256 << 10
"""The thread does little, and its stack counts toward the memory limit of the process."""


class PulseThread:
    """Sends a pulse until closed; stops if the process is stopped or holds the interpreter lock forever.

    A ZeroMQ socket belongs to one thread, so this thread has its own, with its own identity.
    """

    def __init__(self, link: RankLink, rank: int, secret: str, *, every_s: float) -> None:
        """Start the pulse; it shares the context of `link`, so close it before `link`."""
        self._socket = link.context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, pulse_identity(rank))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 1)  # pulses that cannot be delivered need not queue up
        self._socket.connect(link.address)
        self._hello = encode_report(Hello(rank, secret))
        self._every_s = every_s
        self._over = threading.Event()
        usual = threading.stack_size(_STACK_BYTES)
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()
        threading.stack_size(usual)

    def _beat(self) -> None:
        frame = encode_report(Pulse())
        self._socket.send(self._hello)
        while not self._over.wait(self._every_s):
            with contextlib.suppress(zmq.Again):
                self._socket.send(frame, zmq.DONTWAIT)
        self._socket.close()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
