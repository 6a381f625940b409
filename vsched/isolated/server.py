"""The server of isolated calls: forks a process when one is asked for, and reports the signal that killed one.

It has one thread, so that it can fork. Forked processes end when it does, and it ends when the engine does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from vsched.isolated.frames import ANSWERED, KILLED, Channel, head_of, send_frame

_PR_SET_PDEATHSIG = 1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def serve(orders: socket.socket, answer: Callable[[Channel], bytes]) -> None:
    """Fork a process for each channel that arrives; return when the engine is gone.

    `answer` runs in the forked process, once for each call: it reads the frames of the call and returns the answer.
    """
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy these pages
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
    """Start a process, give the engine its pidfd, and return that."""
    server = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            for each in inherited:  # others would not see that their process is gone
                each.close()
            if os.getppid() == server:
                with channel.makefile("rwb") as file:
                    while True:
                        send_frame(file, ANSWERED + answer(file))
        except (EOFError, ConnectionError):
            pass  # the caller needs it no more
        except BaseException:  # noqa: BLE001 - as the interpreter does with an exception
            traceback.print_exc()
        finally:
            os._exit(0)
    pidfd = os.pidfd_open(pid)
    try:
        socket.send_fds(channel, [b"\n"], [pidfd])
    except OSError:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # the caller is gone
    return pidfd


def _report_death(pidfd: int, channel: socket.socket) -> None:
    """Reap a process, and send the number of the signal that killed it, if any."""
    with channel:
        died = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        if died is not None and died.si_code != os.CLD_EXITED:
            channel.setblocking(False)  # a caller that does not read must not hold up the server
            with contextlib.suppress(OSError):
                report = KILLED + bytes([died.si_status])
                channel.send(head_of(report) + report)


def limit_resources(*, cpu_s: float, wall_s: float, memory_bytes: int, stack_bytes: int) -> None:
    """Limit what this process may use from now on; beyond it, it is killed or its allocations fail.

    Args:
        cpu_s: CPU time of all threads; SIGPROF kills the process after that.
        wall_s: Time until SIGALRM kills the process: one that waits for a lock takes no CPU time.
        memory_bytes: Private memory in addition to what the process has. Native code mostly aborts (SIGABRT), or waits
            for a lock for ever: Rust's message about it may need memory as well.
        stack_bytes: Stack of the main thread; SIGSEGV kills the process beyond that.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_at_most(stack_bytes, hard), hard))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (_at_most(limit, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _at_most(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _data_bytes() -> int:
    """Return the private memory of this process, as RLIMIT_DATA counts it: data and stack, in pages, in `statm`."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * _PAGE_BYTES


def read_setup(descriptor: int) -> bytes:
    """Return the setup that the engine wrote for this server."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()
