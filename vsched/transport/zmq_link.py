"""The control plane over ZeroMQ.

The leader binds one ROUTER socket a group and knows its ranks by identity; a rank connects a DEALER. Every rank has its
own queue of bounded length, so one that never reads cannot hold up the others: when its queue is full it is reported,
and the leader gives the group up.

The leader's socket hangs on the event loop by its descriptor. That descriptor is edge-triggered: it only tells that
something changed, so after every event, and after every send, the socket is drained until it would block.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq

from vsched.errors import ConfigError, limit_message
from vsched.wire import FRAME_BYTES_MAX

logger = logging.getLogger(__name__)

QUEUE_MAX = 1000
"""Entries that a rank may be behind before it counts as deaf."""

NAME_CHARACTERS_MAX = 24
"""Room for the name of a socket in its folder."""


def make_socket_folder() -> str:
    """Make a folder for sockets that nobody else may enter.

    Raises:
        ConfigError: When the path would be too long for a socket's address.
    """
    folder = tempfile.mkdtemp(prefix="vsched-")  # mkdtemp makes it 0700
    limit = zmq.IPC_PATH_MAX_LEN - NAME_CHARACTERS_MAX
    if len(folder) > limit:
        Path(folder).rmdir()
        message = limit_message(
            "the path of the folder for temporary files is too long to hold sockets",
            value=len(folder),
            limit=f"{limit} characters",
            remedy="set TMPDIR to a folder with a shorter path",
        )
        raise ConfigError(message)
    return folder


def rank_identity(rank: int) -> bytes:
    """Return the socket identity of a rank."""
    return b"rank-%d" % rank


class LeaderLink:
    """The leader's end of one group."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, on_frame: OnFrame
    ) -> None:
        self.address = address
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MAX)
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._socket.bind(address)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._drain_due = False
        self._closed = False

    def send(self, rank: int, frames: list[bytes]) -> bool:
        """Queue frames for a rank, never waiting; return False when it is gone or deaf."""
        try:
            self._socket.send_multipart([rank_identity(rank), *frames], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        if not self._drain_due:
            # Sending may swallow the edge that announced a message.
            self._drain_due = True
            self._loop.call_soon(self._drain)
        return True

    def _drain(self) -> None:
        self._drain_due = False
        while not self._closed:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) == 1:
                try:
                    self._on_frame(identity, frames[0])
                except Exception:
                    logger.exception("a report could not be taken")

    def close(self) -> None:
        """Stop listening and drop what is queued."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)


OnFrame = Callable[[bytes, bytes], None]
"""Called with the sender's identity and its frame."""


class RankLink:
    """A rank's end; blocking, because a rank does one thing at a time."""

    def __init__(self, address: str, rank: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, rank_identity(rank))
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.RCVHWM, QUEUE_MAX)
        self.socket.connect(address)

    def receive(self) -> list[bytes] | None:
        """Return the next message, or None when there is none yet."""
        with contextlib.suppress(zmq.Again):
            return self.socket.recv_multipart(zmq.DONTWAIT)
        return None

    def send(self, frame: bytes) -> None:
        """Send a report."""
        self.socket.send(frame)

    def close(self) -> None:
        """Send what is queued, waiting at most half a second, and close."""
        self.socket.close()
        self._context.term()


def wait_readable(links: list[RankLink], timeout_s: float) -> bool:
    """Block until a link has a message; return False when none came in time."""
    poller = zmq.Poller()
    for link in links:
        poller.register(link.socket, zmq.POLLIN)
    return bool(poller.poll(int(timeout_s * 1000) + 1))
