"""The engine's end of isolated calls: each runs in a forked process, which may crash, hang or be killed.

A small server process (`vsched.isolated.server`) imports and loads the libraries and data of the calls, and forks
itself for a call: a fork takes milliseconds, loading takes seconds. Short calls reuse kept processes, one at a time. If
a forked process dies, only its current call fails. A dead server is replaced at the next call. The server ends with the
engine, and forked processes end with the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from vsched.errors import RequestFailed
from vsched.isolated.server import ANSWERED, HEAD_BYTES, KILLED, frame_header
from vsched.plain_values import shared_decoder

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

HELLO_S = 60.0
"""Maximum time for the server to load and fork: seconds with a large tokenizer, milliseconds once it is loaded."""
END_S = 10.0
"""Maximum time for a killed process to exit."""
RETRY_AFTER_S = 5
REPLY_BYTES_MAX = 64 << 20
"""Maximum size of a reply; a video's reply has up to a few bytes per token."""
KEPT_MAX = 8
"""Maximum number of idle processes kept for further calls."""
KEPT_CALLS_MAX = 256
"""Calls after which a kept process is replaced: its heap does not shrink after a large call."""
EXTERNAL_SIGNALS = (None, signal.SIGKILL, signal.SIGTERM)
"""Signals sent from outside, not caused by the call; None when the process died with its server."""
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
"""A process that forks must have one thread, and clients must not fill the log with backtraces."""
_STARTS_MAX = 3
"""Maximum number of server starts for one call."""


class CallFailedError(Exception):
    """The process of an isolated call died before it answered.

    Attributes:
        signal: The signal that killed the process; None if it is not known.
        expired: True if the process was killed at the call's deadline.
    """

    def __init__(
        self, message: str, *, killed_by: signal.Signals | None = None, expired: bool = False
    ) -> None:
        super().__init__(message)
        self.signal = killed_by
        self.expired = expired


class ServerLostError(RequestFailed):
    """The server does not start or does not answer, or no process can be forked: a 503."""


class ServerClosedError(RequestFailed):
    """`IsolatedCalls.close` was called, because the engine is stopping: a 503."""


class CallCancellation:
    """Cancels a call from another thread by killing its process."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._lock = threading.Lock()
        self._process: _Forked | None = None

    def cancel(self) -> None:
        """Cancel the call; idempotent."""
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.kill()

    @contextlib.contextmanager
    def watch(self, process: _Forked) -> Iterator[None]:
        with self._lock:
            self._process = process
            if self.is_cancelled:
                process.kill()
        try:
            yield
        finally:
            with self._lock:
                self._process = None


class _Death(NamedTuple):
    """The end of a process without an answer, by a signal if it is known."""

    signal: signal.Signals | None


class _Forked:
    """One forked process, which answers one call at a time."""

    def __init__(self, channel: socket.socket, pidfd: int) -> None:
        self._channel = channel
        self._pidfd = pidfd
        self.calls = 0

    @property
    def is_gone(self) -> bool:
        return bool(self._watch().poll(0))

    def exchange(self, frames: Sequence[bytes], deadline_s: float) -> bytes:
        """Send frames and return the reply; an empty one if the process exited without a reply or a signal.

        Raises:
            TimeoutError: At the deadline.
        """
        self.calls += 1
        until_s = time.monotonic() + deadline_s
        try:
            for frame in frames:
                for part in (frame_header(frame), frame):
                    self._set_deadline(until_s)
                    self._channel.sendall(part)
            size = int.from_bytes(self._receive(HEAD_BYTES, until_s), "little")
            # A larger size means that the memory of the process is corrupted.
            return self._receive(size, until_s) if size <= REPLY_BYTES_MAX else b""
        except TimeoutError:
            raise
        except (EOFError, OSError):  # the process exited
            return b""

    def _receive(self, size: int, until_s: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            self._set_deadline(until_s)
            part = self._channel.recv(size - len(received))
            if not part:
                raise EOFError
            received += part
        return bytes(received)

    def _set_deadline(self, until_s: float) -> None:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._channel.settimeout(left_s)

    def kill_and_wait(self, name: str) -> None:
        """Kill the process and wait until it has exited: until then it can write to shared memory that is reused."""
        self.kill()
        if not self._watch().poll(END_S * 1e3):
            logger.error("a %s process has not exited %g s after it was killed", name, END_S)
        os.close(self._pidfd)
        self._channel.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _watch(self) -> select.poll:
        gone = select.poll()
        gone.register(self._pidfd, select.POLLIN)
        return gone


class IsolatedCalls:
    """Runs calls in forked processes; every method may be called from any thread."""

    def __init__(
        self,
        module: str,
        setup: bytes,
        *,
        name: str,
        failure: str,
        code: str,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Prepare; `start` or the first call starts the server.

        Args:
            module: The server's main module. Its command-line arguments are file descriptors: the socket for orders,
                the file with the setup, and `descriptors`.
            setup: The content of the setup file, which the server reads when it starts.
            name: The noun for log lines and errors, such as `image`.
            failure: The beginning of the client's error if there is no server.
            code: The code of that error.
            descriptors: Further file descriptors that the server inherits.
        """
        self._command = (sys.executable, "-m", module)
        self._setup = setup
        self._name = name
        self._failure = failure
        self._code = code
        self._descriptors = tuple(descriptors)
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._idle: list[_Forked] = []
        self._closed = False

    @property
    def pid(self) -> int:
        """The process id of the server; 0 while it is not running."""
        server = self._server  # another thread may set it to None
        return server.pid if server is not None else 0

    def start(self) -> None:
        """Start the server now, so that the first call does not wait for it to load."""
        with self._lock:
            self._start_server()

    def call(
        self,
        *frames: bytes,
        answer_type: type[Answer],
        deadline_s: float,
        keep: bool = False,
        retry: bool = False,
        cancellation: CallCancellation | None = None,
    ) -> Answer:
        """Send frames to a process and return its answer, which is JSON.

        With `keep`, an idle process is reused if there is one, and the process is kept for later calls. Without `keep`,
        a new process is forked, and has exited when this returns. If this raises, the process has exited in both cases.
        With `retry`, the call is repeated once in a new process if its process was killed from outside.

        Blocks: until the deadline, which starts when the server is ready; with `retry` up to twice as long. Call it in
        a thread.

        Raises:
            CallFailedError: When the process died, was killed at the deadline, or sent no answer of this type.
            ServerLostError: When the server does not start, or does not answer.
            ServerClosedError: When `close` was called.
        """
        try:
            process = (self._take_idle() if keep else None) or self._fork()
            watch = cancellation.watch if cancellation is not None else contextlib.nullcontext
            found = self._exchange(process, frames, answer_type, deadline_s, watch, keep=keep)
            if retry and isinstance(found, _Death) and found.signal in EXTERNAL_SIGNALS:
                process = self._fork()
                found = self._exchange(process, frames, answer_type, deadline_s, watch, keep=keep)
        except TimeoutError:
            what = f"was not done within {deadline_s:g} s, and was killed"
            raise CallFailedError(what, expired=True) from None
        except OSError as error:  # no file descriptor, or no memory to start the server
            what = f"no process of the {self._name} server can be started: {error.strerror}"
            raise self._lost(what) from error
        if not isinstance(found, _Death):
            return found
        what = f"died ({found.signal.name})" if found.signal is not None else "died"
        raise CallFailedError(what, killed_by=found.signal)

    def close(self) -> None:
        """End the server and every process that it forked."""
        with self._lock:
            self._closed = True
            self._forget()
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill_and_wait(self._name)

    def _exchange(
        self,
        process: _Forked,
        frames: Sequence[bytes],
        answer_type: type[Answer],
        deadline_s: float,
        watch: Callable[[_Forked], contextlib.AbstractContextManager[object]],
        *,
        keep: bool,
    ) -> Answer | _Death:
        """Return the answer of a process or its death, then keep the process or end it."""
        found: Answer | _Death = _Death(None)
        try:
            with watch(process):
                reply = process.exchange(frames, deadline_s)
            if reply[:1] == ANSWERED:
                found = shared_decoder(answer_type).decode(reply[1:])
            elif reply[:1] == KILLED:
                found = _Death(signal.Signals(reply[1]))
        except (msgspec.DecodeError, IndexError, ValueError):
            pass  # its memory is corrupted: it is ended, as if it had died
        finally:
            if isinstance(found, _Death) or not (keep and self._put_idle(process)):
                process.kill_and_wait(self._name)
        return found

    def _take_idle(self) -> _Forked | None:
        """Return an idle process that is alive; None if there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                process = self._idle.pop()
            if not process.is_gone:
                return process
            process.kill_and_wait(self._name)

    def _put_idle(self, process: _Forked) -> bool:
        """Keep a process for later calls; return False if it must be ended instead."""
        with self._lock:
            is_kept = (
                not self._closed and process.calls < KEPT_CALLS_MAX and len(self._idle) < KEPT_MAX
            )
            if is_kept:
                self._idle.append(process)
        return is_kept

    def _fork(self) -> _Forked:
        """Fork a new process; replace the server first if it has ended."""
        for _ in range(_STARTS_MAX):
            with self._lock:
                orders = self._start_server()
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
                return _Forked(channel, descriptors[0])
            channel.close()
            with self._lock:
                if self._orders is orders:
                    self._forget()
        raise self._lost(f"the {self._name} server does not start, or does not answer")

    def _lost(self, reason: str) -> ServerLostError:
        logger.error("%s", reason)
        return ServerLostError(
            f"{self._failure}: {reason}. Remedy: try again later.",
            code=self._code,
            status=503,
            retry_after_s=RETRY_AFTER_S,
        )

    def _start_server(self) -> socket.socket:
        """Start the server unless it is running; return its socket."""
        if self._closed:
            raise ServerClosedError("the server is stopping", code="stopping", status=503)
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
                    env={**os.environ, **_ENVIRONMENT},
                    start_new_session=True,  # Ctrl-C in a terminal signals the engine only
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
