"""The fork server: `python -m vsched.fork_server`, a process that has imported what ranks need, and forks them.

Importing takes most of the start of a rank. A forked rank has the imports for nothing, and is otherwise what a new
process would be: it has a session, an environment, a folder and descriptors of its own, it is a child of the engine,
and the engine waits for its end and kills it without any help from here. If this process ends, running ranks stay.

The rank is the engine's own child by a detour: the process that forks it ends at once, and the system gives the orphan
to the nearest ancestor that adopts orphans, which the engine does for this moment (`vsched.aio.replicas.fork_server`).

What is forked has one thread, and locks that another one held would be locked for ever. So this process starts no
thread: no ZeroMQ context, no pool of threads, no device (CUDA cannot be used after a fork).
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
"""Descriptors are kept above this number while they are put in their places."""


class Imports(msgspec.Struct, frozen=True):
    """The first message: the modules to import, and environment variables to set before."""

    modules: Sequence[str]
    environment: dict[str, str]


class ForkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One process to fork.

    Attributes:
        command: The arguments of an interpreter: `-m`, a module, and the words that follow.
        numbers: What the process knows the descriptors by that come with the order, one after the other.
    """

    command: Sequence[str]
    folder: str
    environment: dict[str, str]
    numbers: Sequence[int]


def serve(orders: socket.socket) -> None:
    """Greet each channel that comes in, and fork what is ordered there; return when the engine is gone."""
    while True:
        said, received, _, _ = socket.recv_fds(orders, 1, 1)
        if not said:
            return
        with socket.socket(fileno=received[0]) as channel:
            try:
                channel.send(HELLO)
                line, descriptors, _, _ = socket.recv_fds(channel, BYTES_MAX, DESCRIPTORS_MAX)
            except ConnectionError:
                continue  # nobody wants it any more
            if line:
                answer(channel, orders, msgspec.json.decode(line, type=ForkOrder), descriptors)


def answer(
    channel: socket.socket, orders: socket.socket, order: ForkOrder, descriptors: Sequence[int]
) -> None:
    """Fork a process that is nobody's child here, and send its number: 4 bytes, little-endian."""
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
    # Only now is it the engine's child, which stops adopting when it hears the number.
    with contextlib.suppress(ConnectionError):
        channel.send(os.read(read, 4))
    os.close(read)


def _become(order: ForkOrder, descriptors: Sequence[int], channel: socket.socket) -> NoReturn:
    """Take what a new process would have been given, and run the module."""
    code: object = 1
    try:
        channel.close()
        os.setsid()  # a terminal's Ctrl-C is for the engine alone
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
    except BaseException:  # noqa: BLE001 - as the interpreter does with an exception
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def drop_code_pages() -> None:
    """Unmap the pages of native code that imports have touched; a page that is used again comes from the page cache.

    Only mappings that were never writable: a relocated page exists in this process alone.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, permissions, _offset, _device, inode, *_ = line.split(maxsplit=5)
        if permissions == "r-xp" and inode != "0":
            start, end = (int(each, 16) for each in span.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def main() -> int:
    """Import the modules of the command line, then those of the first message, and fork what is ordered.

    The arguments are the number of the engine's socket, and modules that are known before the configuration is read.
    """
    orders = socket.socket(fileno=int(sys.argv[1]))
    setproctitle(NAME)
    gc.disable()  # what imports make stays, so looking through it again and again takes a tenth of their time
    for name in sys.argv[2:]:
        importlib.import_module(name)
    line = orders.recv(BYTES_MAX)
    if not line:
        return 0  # no rank is to be forked
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
    serve(orders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
