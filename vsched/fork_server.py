"""The fork server, `python -m vsched.fork_server`: a process with all imports loaded that forks ranks.

Imports take most of a rank's start time: a killed rank of tiny25 is back after 0.7 s instead of 5.6. A forked rank
inherits them and is otherwise like a new process: it has its own session, environment, working directory and
descriptors. It is a child of the engine, which waits for its exit and kills it without the fork server. Running ranks
survive the end of the fork server. Rejected: the server as parent, as in `multiprocessing`, since its death would lose
exit codes; a spare rank, which would hold the weights twice.

A rank becomes the engine's child by a double fork: the intermediate process exits at once, and the kernel reparents the
orphan to the nearest subreaper, which the engine is for that moment.

A forked process has one thread, and locks held by other threads would stay locked forever. So the fork server starts no
thread: no ZeroMQ context, no thread pool, no device (CUDA cannot be used after a fork).

`ForkServer` is the engine's side: it starts the server, restarts it when it dies, and requests processes.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import importlib
import logging
import os
import runpy
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import msgspec
from setproctitle import setproctitle

logger = logging.getLogger(__name__)
NAME = "vsched: fork server"
RANK_MODULE = "vsched.rank"
BYTES_MAX = 1 << 20
DESCRIPTORS_MAX = 16
HELLO = b"imported"
_TASKS = Path("/proc/self/task")
_MADV_DONTNEED = 4


class ForkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Request to fork one process.

    Attributes:
        numbers: Descriptor numbers in the new process, in the order of the descriptors sent with the message.
    """

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
    with suppress(ConnectionError):
        channel.send(os.read(read, 4))
    os.close(read)


def _become(order: ForkOrder, descriptors: Sequence[int], channel: socket.socket) -> NoReturn:
    """Set up the process like a newly started one, and run the module."""
    code: object = 1
    try:
        channel.close()
        os.setsid()  # Ctrl-C in a terminal must reach only the engine
        above = max(order.numbers) + 1  # moving one to its number must not close another
        kept = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]
        for each in descriptors:
            os.close(each)
        for each, number in zip(kept, order.numbers, strict=True):
            os.dup2(each, number)
            os.close(each)
        os.chdir(order.folder)
        os.environ.clear()
        os.environ.update(order.environment)
        sys.argv = [RANK_MODULE]
        runpy.run_module(RANK_MODULE, run_name="__main__", alter_sys=True)
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
    # False alarm of CPython 3.12 and later: spaces in the process title shift the fields of /proc/self/stat.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    setproctitle(NAME)
    gc.disable()  # imported objects stay; scanning them takes a tenth of the time
    for name in sys.argv[2:]:
        importlib.import_module(name)
    line = orders.recv(BYTES_MAX)
    if not line:
        return 0  # no rank will be forked
    modules = msgspec.json.decode(line, type=list[str])
    for name in modules:
        importlib.import_module(name)
    if len(list(_TASKS.iterdir())) > 1:
        sys.stderr.write(f"{NAME}: one of {modules} starts threads when it is imported\n")
        return 1
    gc.collect()
    gc.freeze()  # a collection in a rank would copy its pages
    gc.enable()
    drop_code_pages()
    release_free_memory()
    serve(orders)
    return 0


# --- the engine's side ---

SPIN_COUNT = 1_000
"""Number of spins of an idle OpenMP thread before it sleeps, about 20 microseconds.

Only torch's own operations use these threads. The CPU kernels have their own pool, whose cores longer-spinning OpenMP
threads would take (docs/performance.md, "Threads").
"""

RANK_ENVIRONMENT = {
    # Without GOMP_SPINCOUNT, idle threads sleep at once.
    "OMP_WAIT_POLICY": "PASSIVE",
    # The C library keeps memory freed by a step for the next one, in blocks of up to 32 MiB, its maximum: page faults
    # for the same memory in every step would cost as much as the attention over a long prompt.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    # More malloc arenas would fragment the free memory.
    "MALLOC_ARENA_MAX": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def rank_environment(threads: int) -> dict[str, str]:
    """Return the environment of a rank that computes with `threads` threads.

    A `GOMP_SPINCOUNT` in the environment of the engine is kept.
    """
    own = {**RANK_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT), **os.environ, **own}


PRELOADED = ("vsched.transport.zmq_link", "vsched.worker.member")
"""Modules that every rank imports, with any worker."""
IMPORT_S = 300.0
"""Limit on the imports, which take 4 s, and minutes on an overloaded machine."""
FORK_S = 60.0
"""Limit on a reply after the imports: a fork takes milliseconds, and seconds on an overloaded machine."""
_PR_SET_CHILD_SUBREAPER = 36


class ForkServerLostError(Exception):
    """The fork server died or does not respond."""


class ForkServer:
    """A process that has imported `modules` and forks ranks; it ends with the engine, even if that is killed.

    If it dies, it is replaced at the next request. It may be started before the event loop.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        """Create a server that starts at the first request, or with `start` or `begin_imports`."""
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._imported = False

    @property
    def pid(self) -> int:
        """The process id; 0 while it is not running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    async def open(self) -> socket.socket:
        """Return a channel for one order after the server's imports are done; the caller closes it.

        Blocks: at most `IMPORT_S`, or `FORK_S` after the imports; may be cancelled.

        Raises:
            ForkServerLostError: When the server dies or does not respond; it is killed then.
        """
        if not self.pid:
            if self._process is not None:
                logger.warning("the fork server ended (exit code %d)", self._process.returncode)
            self._forget()
            self.begin_imports()
        assert self._orders is not None
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        try:
            with theirs:
                socket.send_fds(self._orders, [b"\n"], [theirs.fileno()])
            said = await self._receive(channel, FORK_S if self._imported else IMPORT_S)
        except BaseException as error:
            channel.close()
            if isinstance(error, OSError):
                raise ForkServerLostError(f"the fork server is gone ({error})") from None
            raise
        if said != HELLO:
            channel.close()
            raise ForkServerLostError("the fork server ended while it imported")
        self._imported = True
        return channel

    async def fork(
        self, channel: socket.socket, order: ForkOrder, descriptors: Sequence[int]
    ) -> int:
        """Fork a process with these descriptors, as a child of this process, and return its id.

        Blocks: as `open` after the imports. Cancelling it leaks the process.

        Raises:
            ForkServerLostError: When the server does not respond; it is killed then.
        """
        try:
            with _adopting_orphans():
                socket.send_fds(channel, [msgspec.json.encode(order)], descriptors)
                pid = await self._receive(channel, FORK_S)
        except (OSError, ValueError) as error:
            raise ForkServerLostError(f"the fork server accepts no request ({error})") from None
        if not pid:
            raise ForkServerLostError("the fork server could not fork")
        return int.from_bytes(pid, "little")

    async def _receive(self, channel: socket.socket, limit_s: float) -> bytes:
        """Return the server's next message; kill the server if there is none in time."""
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.get_running_loop().sock_recv(channel, len(HELLO))
        except TimeoutError:
            if self._process is not None:
                self._process.kill()
            raise ForkServerLostError(f"the fork server did not answer for {limit_s:g} s") from None

    def close(self) -> None:
        """End the server; no request is pending any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._forget()

    def start(self) -> socket.socket:
        """Start the process, which imports `PRELOADED` and waits for `begin_imports`; return its socket."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(  # noqa: S603 - no outside input
                [sys.executable, "-m", "vsched.fork_server", str(number), *PRELOADED],
                stdin=subprocess.DEVNULL,
                pass_fds=(number,),
                env=rank_environment(1),
                start_new_session=True,  # a terminal's Ctrl-C must reach only the engine
            )
        return self._orders

    def begin_imports(self, modules: Sequence[str] | None = None) -> None:
        """Start importing: these modules, or by default the constructor's."""
        if modules is not None:
            self._modules = modules
        orders = self._orders or self.start()
        with suppress(ConnectionError):  # it died: `open` detects that
            orders.send(msgspec.json.encode(self._modules))
        self._imported = False

    def _forget(self) -> None:
        if self._orders is not None:
            self._orders.close()
        self._process = self._orders = None


_adopting = 0
_adopting_lock = threading.Lock()


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of orphaned descendants; counted, because several engines in a process may need it at once."""
    _count_adopters(1)
    try:
        yield
    finally:
        _count_adopters(-1)


def _count_adopters(more: int) -> None:
    global _adopting
    with _adopting_lock:
        _adopting += more
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(_adopting > 0), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
