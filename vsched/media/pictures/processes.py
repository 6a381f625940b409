"""The engine's end of picture processes: large images are decoded and processed outside the engine.

Pillow and numpy keep the interpreter's lock through single calls whose time grows with the image, and the event loop
stands still meanwhile. So an image that takes `LARGE_BYTES` or more gets a process of its own, forked from a small
server (`vsched.media.pictures.server`) that has imported what is needed. It writes to the arena and ends, so its memory
goes back to the system, and whatever kills it costs this one image. A thread of the pool waits for it: order, budget,
and what becomes of a request that goes away are the same for all images.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from io import BufferedRWPair

import msgspec

from vsched.errors import RequestFailed, RequestRefused
from vsched.faultpoints import fault_point
from vsched.media.decode import DecodeLimits
from vsched.media.embeddings import Embedding
from vsched.media.measure import Measured
from vsched.types import ArraySpec, Extent
from vsched.worker.capabilities import PixelBounds
from vsched.worker.contract import ImageRecipe, Preprocessor

logger = logging.getLogger(__name__)

LARGE_BYTES = 64 << 20
"""Images that may take so much memory get a process of their own; a photograph of 12 megapixels does."""
SERVER_COMMAND = (sys.executable, "-m", "vsched.media.pictures.server")
HELLO_S = 60.0
"""How long the server may take to import and to fork: half a second and some milliseconds on an idle machine."""
END_S = 10.0
"""How long a process that was killed may take to be gone."""
_SIZE_BYTES = 8


class PictureWork(msgspec.Struct, frozen=True):
    """What the server is told when it starts."""

    recipe: ImageRecipe
    limits: DecodeLimits


class PictureOrder(msgspec.Struct, frozen=True):
    """One image to process; its encoded bytes follow."""

    specs: tuple[ArraySpec, ...]
    place: Extent
    bounds: PixelBounds | None = None


class PictureOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it: an empty message where its arrays are in the arena."""

    message: str = ""
    code: str = ""
    status: int = 0
    refused: bool = False


def send_frame(channel: BufferedRWPair, content: bytes) -> None:
    """Write one message, its size before it."""
    channel.write(len(content).to_bytes(_SIZE_BYTES, "little"))
    channel.write(content)
    channel.flush()


def read_frame(channel: BufferedRWPair) -> bytes:
    """Return the next message.

    Raises:
        EOFError: When the other end is gone before it is complete.
    """
    size = channel.read(_SIZE_BYTES)
    content = channel.read(int.from_bytes(size, "little"))
    if len(size) < _SIZE_BYTES or len(content) < int.from_bytes(size, "little"):
        raise EOFError
    return content


class _ServerLostError(Exception):
    """The server ended, or does not answer."""


def picture_processes(
    preprocessor: Preprocessor, limits: DecodeLimits, *, arena_fd: int, deadline_s: float
) -> PictureProcesses | None:
    """Return processes for large images; None where the preprocessor has no recipe for them.

    `arena_fd` is the arena, whose pixels come first, and `deadline_s` the time of one image.
    """
    make_recipe = getattr(preprocessor, "image_recipe", None)
    if make_recipe is None:
        return None
    work = msgspec.json.encode(PictureWork(make_recipe(), limits))
    return PictureProcesses(work, arena_fd=arena_fd, deadline_s=deadline_s)


class PictureProcesses:
    """Processes for large images, and the server that they are forked from.

    Every method may be called from any thread. The server starts when the first large image comes, is replaced when
    it has died, and ends with the engine, as its children do.
    """

    def __init__(self, work: bytes, *, arena_fd: int, deadline_s: float) -> None:
        """Prepare; `work` is a `PictureWork`."""
        self._work = work
        self._arena_fd = arena_fd
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._closed = False

    @staticmethod
    def takes(image: Measured) -> bool:
        """Whether an image is large."""
        return not image.is_embedded and image.work_bytes >= LARGE_BYTES

    @property
    def pid(self) -> int:
        """The process id of the server; 0 while it does not run."""
        return self._server.pid if self._server is not None else 0

    def fill(self, image: Measured, place: Extent) -> None:
        """Have a process fill an extent of the arena; nobody writes there any more when this returns.

        Blocks: for the deadline at most, and until the process is gone; call it in a thread of the pool.

        Raises:
            RequestRefused: When the image is damaged.
            RequestFailed: When the processor failed, or the process died or took too long.
        """
        assert not isinstance(image.content, Embedding)
        fault_point("media.decode")
        channel, pidfd = self._fork()
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _kill(pidfd)

        timer = threading.Timer(self._deadline_s, expire)
        timer.daemon = True
        timer.start()
        outcome: PictureOutcome | None = None
        try:
            with channel, channel.makefile("rwb") as file:
                order = PictureOrder(image.plan.arrays, place, image.bounds)
                send_frame(file, msgspec.json.encode(order))
                send_frame(file, image.content)
                outcome = msgspec.json.decode(read_frame(file), type=PictureOutcome)
        except (EOFError, OSError, msgspec.DecodeError):
            pass  # it died, and there is no outcome
        finally:
            timer.cancel()
            timer.join()
            _end(pidfd)
        _raise(outcome, f"within {self._deadline_s:g} s" if expired.is_set() else "")

    def close(self) -> None:
        """End the server, and with it whatever it forked."""
        with self._lock:
            self._closed = True
            self._forget()

    def _fork(self) -> tuple[socket.socket, int]:
        """Return a channel to a new process, and its pidfd; a server that is gone is replaced once."""
        for _ in range(2):
            with self._lock:
                orders = self._begin()
            channel, theirs = socket.socketpair()
            channel.settimeout(HELLO_S)
            try:
                with theirs:
                    socket.send_fds(orders, [b"\n"], [theirs.fileno()])
                said, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
                if not said or not descriptors:
                    raise _ServerLostError
            except (OSError, _ServerLostError):  # what says nothing for too long is lost as well
                channel.close()
                with self._lock:
                    if self._orders is orders:
                        self._forget()
                continue
            except BaseException:
                channel.close()
                raise
            channel.settimeout(None)
            return channel, descriptors[0]
        logger.error("the server of picture processes does not start, or does not answer")
        raise RequestFailed("the image could not be processed", code="image_processing_failed")

    def _begin(self) -> socket.socket:
        """Return the socket of the server, which is started when it does not run."""
        if self._closed:
            raise RequestFailed("the server is stopping", code="stopping", status=503)
        if self._server is not None and self._server.poll() is not None:
            logger.warning("the picture server ended (exit code %d)", self._server.returncode)
            self._forget()
        if self._orders is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, os.fdopen(os.memfd_create("vsched-preprocessor"), "wb") as work:
                work.write(self._work)
                work.flush()
                numbers = (theirs.fileno(), work.fileno(), self._arena_fd)
                self._server = subprocess.Popen(  # noqa: S603 - the engine's own words
                    [*SERVER_COMMAND, *map(str, numbers)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=numbers,
                    start_new_session=True,  # a terminal's Ctrl-C is for the engine alone
                )
            self._orders = ours
        return self._orders

    def _forget(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        if self._orders is not None:
            self._orders.close()
        self._server = self._orders = None


def _raise(outcome: PictureOutcome | None, missed: str) -> None:
    """Raise what became of an image, if that is anything but its arrays."""
    if outcome is None:
        what = f"was not done {missed}, and was killed" if missed else "died"
        logger.error("the process of an image %s", what)
        raise RequestFailed(
            f"the image could not be processed: its process {what}. "
            "Remedy: send another encoding of the image, or a smaller one.",
            code="image_processing_failed",
        )
    if not outcome.message:
        return
    if outcome.refused:
        raise RequestRefused(outcome.message, code=outcome.code, status=outcome.status)
    raise RequestFailed(outcome.message, code=outcome.code, status=outcome.status)


def _kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return  # it is gone


def _end(pidfd: int) -> None:
    """See to it that a process runs no more: it could write where other pixels are by then."""
    _kill(pidfd)
    gone = select.poll()
    gone.register(pidfd, select.POLLIN)
    if not gone.poll(END_S * 1e3):
        logger.error("the process of an image is not gone %g s after it was killed", END_S)
    os.close(pidfd)
