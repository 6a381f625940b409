"""The engine's end of the fork server: it starts the server, starts it anew when it dies, and orders processes."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from vsched.aio.replicas.rank_environment import rank_environment
from vsched.fork_server import HELLO, ForkOrder, Imports

logger = logging.getLogger(__name__)
PRELOADED = ("vsched.transport.pulse", "vsched.transport.zmq_link", "vsched.worker.loading")
"""What every rank imports, whatever its worker."""
IMPORT_S = 60.0
"""How long the server may do nothing while it imports."""
FORK_S = 10.0
"""How long it may do nothing until it is heard, once it has imported, and while it forks."""
WORK_S = 120.0
"""Most seconds of a processor until it is heard: imports take 4, and a fork some thousandths."""
_IDLE_PARTS = 4
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36


class ForkServerLostError(Exception):
    """The fork server died, or does not answer."""


class IdleForkServer(NamedTuple):
    """A fork server's process that has not been told what to import for the ranks of a plug-in."""

    process: subprocess.Popen[bytes]
    orders: socket.socket

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.orders.close()


def start_idle(environment: Mapping[str, str]) -> IdleForkServer:
    """Start the process of a fork server, which imports what every rank needs."""
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    orders.setblocking(False)
    with theirs:
        number = theirs.fileno()
        process = subprocess.Popen(  # noqa: S603 - the engine's own words
            [sys.executable, "-m", "vsched.fork_server", str(number), *PRELOADED],
            stdin=subprocess.DEVNULL,
            pass_fds=(number,),
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C is for the engine alone
        )
    return IdleForkServer(process, orders)


@contextmanager
def idle_fork_server() -> Iterator[IdleForkServer]:
    """Start the process of a fork server before the configuration is known; it has ended when the context ends."""
    idle = start_idle(rank_environment(1))
    try:
        yield idle
    finally:
        idle.close()


class ForkServer:
    """A process that has imported `modules`, and forks others; it ends with the engine, however that ends.

    One that dies while it is idle is replaced at once, so that the next loss of a rank finds it. One that dies while it
    imports is not, until somebody asks again. It may be begun before there is an event loop; it is watched from the
    first order on.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str],
        idle: IdleForkServer | None = None,
    ) -> None:
        """Prepare; it starts when a process is first asked for, or is begun: as `idle`, the first time."""
        self._imports = Imports(modules, dict(environment))
        self._idle = idle
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._stop_watching: Callable[[], None] | None = None
        self._imported = False

    @property
    def pid(self) -> int:
        """The process id; 0 while it does not run."""
        return self._process.pid if self._process is not None else 0

    async def open(self) -> socket.socket:
        """Return a channel for one order, once the server has imported everything; the caller closes it.

        Blocks: while the server works, for `WORK_S` of a processor at most, and for `IMPORT_S` or, when it has
        imported, `FORK_S` while it does not; may be cancelled.

        Raises:
            ForkServerLostError: When it dies meanwhile, or does not answer; it is killed then.
        """
        if self._process is None or self._process.poll() is not None:
            self._forget()
            self.begin()
        if self._stop_watching is None:
            self._watch(asyncio.get_running_loop())
        assert self._orders is not None
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        try:
            with theirs:
                socket.send_fds(self._orders, [b"\n"], [theirs.fileno()])
            said = await self._hear(channel, FORK_S if self._imported else IMPORT_S)
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
        """Return the id of a new process, a child of this one, which has these descriptors.

        Blocks: as `open` does when the server has imported. Whoever cancels it loses the process.

        Raises:
            ForkServerLostError: When the server does not answer; it is killed then.
        """
        try:
            with _adopting_orphans():
                socket.send_fds(channel, [msgspec.json.encode(order)], descriptors)
                pid = await self._hear(channel, FORK_S)
        except (OSError, ValueError) as error:
            raise ForkServerLostError(f"the fork server takes no order ({error})") from None
        if not pid:
            raise ForkServerLostError("the fork server could not fork")
        return int.from_bytes(pid, "little")

    async def _hear(self, channel: socket.socket, idle_s: float) -> bytes:
        """Return what the server says next; one that does nothing for `idle_s`, or works for too long, is killed.

        A machine with more to do than it has cores may let it wait for minutes: it is not replaced while it works,
        since another one would begin all over.
        """
        began_s = worked_s = self._worked_s()
        idle = 0
        # Not cancelled and begun again, which could lose what was just heard.
        said = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(channel, len(HELLO)))
        try:
            # In parts: a stop of the whole machine, of any length, ends one part only.
            while not (await asyncio.wait({said}, timeout=idle_s / _IDLE_PARTS))[0]:
                before_s, worked_s = worked_s, self._worked_s()
                idle = idle + 1 if worked_s == before_s else 0
                if idle == _IDLE_PARTS or worked_s >= began_s + WORK_S:
                    self._kill_silent(idle_s if idle else 0)
            return said.result()
        finally:
            said.cancel()
            await asyncio.wait({said})

    def _kill_silent(self, idle_s: float) -> NoReturn:
        """End a server that did nothing for so long, or, where that is 0, worked for too long."""
        if self._process is not None:
            self._process.kill()
        raise ForkServerLostError(
            f"the fork server said nothing, and did nothing for {idle_s:g} s"
            if idle_s
            else f"the fork server said nothing in {WORK_S:g} s of a processor"
        )

    def _worked_s(self) -> float:
        """Return the seconds of a processor that the server has had; 0 where it is gone."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return 0.0
        user, system = fields.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) * _TICK_S

    def close(self) -> None:
        """End the server; nobody waits for a process any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._forget()

    def begin(self) -> None:
        """Start the process, which imports from now on."""
        idle, self._idle = self._idle, None
        self._process, self._orders = idle or start_idle(self._imports.environment)
        with suppress(ConnectionError):  # it died: `open` finds out
            self._orders.send(msgspec.json.encode(self._imports))
        self._imported = False

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._process is not None
        pidfd = os.pidfd_open(self._process.pid)

        def stop() -> None:
            if not loop.is_closed():
                loop.remove_reader(pidfd)
            os.close(pidfd)

        self._stop_watching = stop
        loop.add_reader(pidfd, self._ended)

    def _ended(self) -> None:
        assert self._process is not None
        code, imported = self._process.wait(), self._imported
        logger.warning("the fork server ended (exit code %d)", code)
        self._forget()
        if imported:
            self.begin()
            self._watch(asyncio.get_running_loop())

    def _forget(self) -> None:
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None
        if self._orders is not None:
            self._orders.close()
        self._process = self._orders = None


_adopting = 0
_adopting_lock = threading.Lock()


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Be the parent of descendants whose parents end; several engines of a process may want that at a time."""
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
