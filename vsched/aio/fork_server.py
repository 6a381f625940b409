"""The engine's side of the fork server: starts it, restarts it when it dies, and requests processes."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from vsched.fork_server import HELLO, ForkOrder, Imports

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


logger = logging.getLogger(__name__)
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
        """Create a server that starts at the first request, or with `start` or `begin`."""
        self._imports = Imports(modules, rank_environment(1))
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
            self.begin()
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
            raise ForkServerLostError(f"the fork server takes no order ({error})") from None
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
            raise ForkServerLostError(f"the fork server said nothing for {limit_s:g} s") from None

    def close(self) -> None:
        """End the server; no request is pending any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._forget()

    def start(self) -> socket.socket:
        """Start the process, which imports `PRELOADED` and waits for `begin`; return its socket."""
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

    def begin(self, modules: Sequence[str] | None = None) -> None:
        """Have the process import these modules, or those of the constructor."""
        if modules is not None:
            self._imports = Imports(modules, self._imports.environment)
        orders = self._orders or self.start()
        with suppress(ConnectionError):  # it died: `open` detects that
            orders.send(msgspec.json.encode(self._imports))
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
