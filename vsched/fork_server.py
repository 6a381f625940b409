"""The fork server, `python -m vsched.fork_server`: a process with all imports loaded that forks ranks.

Imports take most of a rank's start time. A forked rank inherits them and is otherwise like a new process: it has its
own session, environment, working directory and descriptors. It is a child of the engine, which waits for its exit and
kills it without the fork server. Running ranks survive the end of the fork server.

A rank becomes the engine's child by a double fork: the intermediate process exits at once, and the kernel reparents the
orphan to the nearest subreaper, which the engine is for that moment (`vsched.aio.fork_server`).

A forked process has one thread, and locks held by other threads would stay locked forever. So the fork server starts no
thread: no ZeroMQ context, no thread pool, no device (CUDA cannot be used after a fork).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from setproctitle import setproctitle

NAME = "vsched: fork server"
BYTES_MAX = 1 << 20
DESCRIPTORS_MAX = 16
HELLO = b"imported"
_TASKS = Path("/proc/self/task")
_MADV_DONTNEED = 4
_FREE_FROM = 500
"""Descriptors are duplicated above this number before they are moved to their final numbers."""


class Imports(msgspec.Struct, frozen=True):
    """First message: modules to import, and environment variables to set before."""

    modules: Sequence[str]
    environment: dict[str, str]


class ForkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Request to fork one process.

    Attributes:
        command: Arguments of the interpreter: `-m`, a module, and the module's arguments.
        numbers: Descriptor numbers in the new process, in the order of the descriptors sent with the message.
    """

    command: Sequence[str]
    folder: str
    environment: dict[str, str]
    numbers: Sequence[int]


def serve(orders: socket.socket) -> None:
    """Greet each new channel and fork the process ordered there; return when the engine is gone."""
    while True:
        said, received, _, _ = socket.recv_fds(orders, 1, 1)
        if not said:
            return
        with socket.socket(fileno=received[0]) as channel:
            try:
                channel.send(HELLO)
                line, descriptors, _, _ = socket.recv_fds(channel, BYTES_MAX, DESCRIPTORS_MAX)
            except ConnectionError:
                continue  # the engine has closed the channel
            if line:
                answer(channel, orders, msgspec.json.decode(line, type=ForkOrder), descriptors)


def answer(
    channel: socket.socket, orders: socket.socket, order: ForkOrder, descriptors: Sequence[int]
) -> None:
    """Fork an orphan process, and send its pid: 4 bytes, little-endian."""
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            pid = os.fork()
            if not pid:
                for each in (read, write):
                    os.close(each)
                orders.close()
                _become(order, descriptors, channel)
            os.write(write, pid.to_bytes(4, "little"))
        finally:
            os._exit(0)
    os.waitpid(parent, 0)
    for each in (write, *descriptors):
        os.close(each)
    # The orphan is the engine's child only now; the engine stops being a subreaper when it receives the pid.
    with contextlib.suppress(ConnectionError):
        channel.send(os.read(read, 4))
    os.close(read)


def _become(order: ForkOrder, descriptors: Sequence[int], channel: socket.socket) -> NoReturn:
    """Set up the process like a newly started one, and run the module."""
    code: object = 1
    try:
        channel.close()
        os.setsid()  # Ctrl-C in a terminal must reach only the engine
        kept = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FREE_FROM) for each in descriptors]
        for each in descriptors:
            os.close(each)
        for each, number in zip(kept, order.numbers, strict=True):
            os.dup2(each, number)
            os.close(each)
        os.chdir(order.folder)
        os.environ.clear()
        os.environ.update(order.environment)
        _, module, *words = order.command
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - like the interpreter's own handling of exceptions
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def drop_code_pages() -> None:
    """Unmap code pages of native libraries that imports have touched; the page cache still has them if needed.

    Only mappings that were never writable are dropped: relocated pages exist only in this process.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, permissions, _offset, _device, inode, *_ = line.split(maxsplit=5)
        if permissions == "r-xp" and inode != "0":
            start, end = (int(each, 16) for each in span.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def release_free_memory() -> None:
    """Return the free pages of the C library's heap to the system, which `MALLOC_TRIM_THRESHOLD_` keeps otherwise."""
    ctypes.CDLL(None).malloc_trim(0)


def main() -> int:
    """Import the modules of the command line and of the first message, then fork on request.

    The arguments are the descriptor of the engine's socket, and modules that are known before the configuration is
    read.
    """
    orders = socket.socket(fileno=int(sys.argv[1]))
    setproctitle(NAME)
    gc.disable()  # imported objects stay; scanning them takes a tenth of the time
    for name in sys.argv[2:]:
        importlib.import_module(name)
    line = orders.recv(BYTES_MAX)
    if not line:
        return 0  # no rank will be forked
    imports = msgspec.json.decode(line, type=Imports)
    os.environ.update(imports.environment)
    for name in imports.modules:
        importlib.import_module(name)
    if len(list(_TASKS.iterdir())) > 1:
        sys.stderr.write(f"{NAME}: one of {imports.modules} starts threads when it is imported\n")
        return 1
    gc.collect()
    gc.freeze()  # a collection in a rank would copy its pages
    gc.enable()
    drop_code_pages()
    release_free_memory()
    serve(orders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
