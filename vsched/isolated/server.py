"""The server of isolated calls: forks a process on request, and reports the signal if one is killed.

It has a single thread, so that forking is safe. Forked processes end with the server, and the server with the engine.
A call and its answer are frames: an 8-byte size, then the content.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import resource
import select
import signal
import socket
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

HEAD_BYTES = 8
ANSWERED, KILLED = b"a", b"k"
"""The first byte of a reply; an answer, or the number of the signal that killed the process, follows it."""


Channel = io.BufferedIOBase
"""One end of a byte stream."""


def frame_header(content: bytes) -> bytes:
    """Return the header of a frame."""
    return len(content).to_bytes(HEAD_BYTES, "little")


def send_frame(channel: Channel, content: bytes) -> None:
    """Write one frame and flush it."""
    channel.write(frame_header(content))
    channel.write(content)  # separately, to avoid a copy: it may be an image
    channel.flush()


def read_frame(channel: Channel) -> bytes:
    """Return the content of the next frame.

    Raises:
        EOFError: When the stream ends within the frame.
    """
    head = channel.read(HEAD_BYTES)
    size = int.from_bytes(head, "little")
    content = channel.read(size)
    if len(head) < HEAD_BYTES or len(content) < size:
        raise EOFError
    return content


_PR_SET_PDEATHSIG = 1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def serve(orders: socket.socket, answer: Callable[[Channel], bytes]) -> None:
    """Fork a process for each channel received; return when the engine has exited.

    `answer` runs in the forked process, once for each call: it reads the frames of the call and returns the answer.
    """
    gc.collect()
    gc.freeze()  # otherwise a collection in a forked process would copy these pages
    running: dict[int, socket.socket] = {}
    ready = select.poll()
    ready.register(orders, select.POLLIN)
    while True:
        for descriptor, _ in ready.poll():
            if descriptor != orders.fileno():
                ready.unregister(descriptor)
                _report_death(descriptor, running.pop(descriptor))
                continue
            said, received, _, _ = socket.recv_fds(orders, 1, 1)
            if not said:
                return
            channel = socket.socket(fileno=received[0])
            pidfd = _fork((orders, *running.values()), channel, answer)
            running[pidfd] = channel
            ready.register(pidfd, select.POLLIN)


def _fork(
    inherited: Iterable[socket.socket], channel: socket.socket, answer: Callable[[Channel], bytes]
) -> int:
    """Fork a process, send its pidfd to the engine, and return the pidfd."""
    server = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            for each in inherited:
                each.close()  # an open copy would hide the end of another process from its caller
            if os.getppid() == server:
                with channel.makefile("rwb") as file:
                    while True:
                        send_frame(file, ANSWERED + answer(file))
        except (EOFError, ConnectionError):
            pass  # the caller has closed the channel
        except BaseException:  # noqa: BLE001 - print any exception, as the interpreter does
            traceback.print_exc()
        finally:
            os._exit(0)
    pidfd = os.pidfd_open(pid)
    try:
        socket.send_fds(channel, [b"\n"], [pidfd])
    except OSError:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # the caller has closed the channel
    return pidfd


def _report_death(pidfd: int, channel: socket.socket) -> None:
    """Reap a process; if a signal killed it, send the signal's number to the caller."""
    with channel:
        died = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        if died is not None and died.si_code != os.CLD_EXITED:
            channel.setblocking(False)  # a caller that does not read must not block the server
            with contextlib.suppress(OSError):
                report = KILLED + bytes([died.si_status])
                channel.send(frame_header(report) + report)


def limit_resources(*, cpu_s: float, wall_s: float, memory_bytes: int, stack_bytes: int) -> None:
    """Limit the CPU time, the time, the memory and the stack of this process from now on.

    Args:
        cpu_s: CPU time of all threads; beyond it, SIGPROF kills the process.
        wall_s: Time until SIGALRM kills the process; a process that waits for a lock uses no CPU time.
        memory_bytes: Private memory in addition to the current usage; beyond it, allocations fail. Native code mostly
            aborts then (SIGABRT), or waits for a lock for ever: Rust's error message may need memory as well.
        stack_bytes: Stack of the main thread; beyond it, SIGSEGV kills the process.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_at_most(stack_bytes, hard), hard))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # RLIMIT_DATA counts data and stack, which `statm` has in pages.
    limit = int(Path("/proc/self/statm").read_text().split()[5]) * _PAGE_BYTES + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (_at_most(limit, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _at_most(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def read_setup(descriptor: int) -> bytes:
    """Return the content of the setup file that the engine wrote for this server."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()
