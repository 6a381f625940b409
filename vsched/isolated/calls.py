"""The engine's end of isolated calls: each call runs in a process of its own, which may crash, hang or be killed.

A small server process (`vsched.isolated.server`) has imported and loaded what the calls need, and forks itself for each
call: a fork takes milliseconds, loading takes seconds. Whatever happens to the forked process, that one call fails and
everything else goes on. A server that died is replaced at the next call. The server ends with the engine, and forked
processes end with the server.
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
from collections.abc import Sequence

from vsched.isolated.frames import ANSWERED, KILLED, read_frame, send_frame

logger = logging.getLogger(__name__)

HELLO_S = 60.0
"""Maximum time for the server to load and to fork: seconds for a large tokenizer, milliseconds once it is loaded."""
END_S = 10.0
"""Maximum time for a killed process to be gone."""


class CallFailedError(Exception):
    """An isolated call gave no answer.

    Attributes:
        signal: What killed the process; None if it is not known.
        expired: Whether the process was killed here because the deadline had passed.
    """

    def __init__(
        self, message: str, *, killed_by: signal.Signals | None = None, expired: bool = False
    ) -> None:
        super().__init__(message)
        self.signal = killed_by
        self.expired = expired


class ServerLostError(Exception):
    """The server does not start, or does not answer."""


class ServerClosedError(Exception):
    """The engine is stopping: no call is made any more."""


class IsolatedCalls:
    """Runs calls in forked processes; every method may be called from any thread."""

    def __init__(
        self, module: str, setup: bytes, *, name: str, descriptors: Sequence[int] = ()
    ) -> None:
        """Take the server's main module, and what it reads at its start.

        Args:
            module: The module to run. Its arguments are the descriptors of the socket for orders, of a file with the
                setup, and the further ones.
            setup: What the server loads.
            descriptors: Further files that the server inherits.
            name: The noun for log lines and errors, such as `image`.
        """
        self._command = (sys.executable, "-m", module)
        self._setup = setup
        self._name = name
        self._descriptors = tuple(descriptors)
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int:
        """The process id of the server; 0 while it is not running."""
        return self._server.pid if self._server is not None else 0

    def start(self) -> None:
        """Start the server, so that the first call finds it loaded."""
        with self._lock:
            self._begin()

    def call(self, *frames: bytes, deadline_s: float) -> bytes:
        """Send frames to a new process and return its answer; the process is gone when this returns.

        Blocks: for the deadline, after the server is ready. Call it in a thread.

        Raises:
            CallFailedError: When the process died, or was killed at the deadline.
            ServerLostError: When the server does not start, or does not answer.
            ServerClosedError: When `close` was called.
        """
        channel, pidfd = self._fork()
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _kill(pidfd)

        timer = threading.Timer(deadline_s, expire)
        timer.daemon = True
        timer.start()
        reply = b""
        try:
            with channel, channel.makefile("rwb") as file:
                for frame in frames:
                    send_frame(file, frame)
                reply = read_frame(file)
        except (EOFError, OSError):
            pass  # the server died, and the process with it
        finally:
            timer.cancel()
            timer.join()
            self._end(pidfd)
        if reply[:1] == ANSWERED:
            return reply[1:]
        if expired.is_set():
            what = f"was not done within {deadline_s:g} s, and was killed"
            raise CallFailedError(what, expired=True)
        killed_by = signal.Signals(reply[1]) if reply[:1] == KILLED and reply[1:] else None
        what = f"died ({killed_by.name})" if killed_by is not None else "died"
        raise CallFailedError(what, killed_by=killed_by)

    def close(self) -> None:
        """End the server, and with it every process that it forked."""
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
            except OSError:  # also a server that does not answer in time
                said, descriptors = b"", []
            except BaseException:
                channel.close()
                raise
            if said and descriptors:
                channel.settimeout(None)
                return channel, descriptors[0]
            channel.close()
            with self._lock:
                if self._orders is orders:
                    self._forget()
        raise ServerLostError(f"the {self._name} server does not start, or does not answer")

    def _begin(self) -> socket.socket:
        """Return the server's socket, and start the server unless it is running."""
        if self._closed:
            raise ServerClosedError("the server is stopping")
        if self._server is not None and self._server.poll() is not None:
            logger.warning(
                "the %s server ended (exit code %d)", self._name, self._server.returncode
            )
            self._forget()
        if self._orders is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, os.fdopen(os.memfd_create("vsched-setup"), "wb") as setup:
                setup.write(self._setup)
                setup.flush()
                numbers = (theirs.fileno(), setup.fileno(), *self._descriptors)
                self._server = subprocess.Popen(  # noqa: S603 - the command is the engine's own
                    [*self._command, *map(str, numbers)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=numbers,
                    # A process that forks must have one thread; BLAS would start one for each core.
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
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

    def _end(self, pidfd: int) -> None:
        """Make sure that a process is gone: it could write to memory that is used again by then."""
        _kill(pidfd)
        gone = select.poll()
        gone.register(pidfd, select.POLLIN)
        if not gone.poll(END_S * 1e3):
            logger.error("a %s process is not gone %g s after it was killed", self._name, END_S)
        os.close(pidfd)


def _kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return  # it is gone
