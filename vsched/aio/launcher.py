"""Starts ranks and connects them to their leaders; by default they are child processes of the engine.

The ranks of a worker group run on a host, which has a folder for their sockets, and their arena. The parts of a rank's
specification that depend on the host are filled in there, so a worker group sends the same to every host.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from vsched.aio.leader import LeaderEnd
from vsched.config import Config
from vsched.errors import VschedError
from vsched.fork_server import (
    RANK_MODULE,
    ForkOrder,
    ForkServer,
    ForkServerLostError,
    rank_environment,
)
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import LeaderLink, OnFrame, make_socket_folder
from vsched.types import ModelInfo
from vsched.worker.registry import load_worker
from vsched.worker.spec import RankSpec, threads_of

logger = logging.getLogger(__name__)

TOLD_CODES = (1, 2)
"""Exit codes of ranks that have sent a report with the reason."""
LAST_WORD_S = 1.0
"""Delay of reporting such an exit: the report is more precise, and may arrive later on a busy machine."""


class RankProcess:
    """A rank's process; `on_exit(code)` is called once, on the event loop, when it ends by itself.

    It is forked by a fork server, or a new interpreter if there is none or the server is lost. `pid` is its process id,
    0 before it exists.
    """

    def __init__(
        self,
        spec: RankSpec,
        *,
        on_exit: Callable[[int], None],
        fork_server: ForkServer | None = None,
    ) -> None:
        """Start it in the environment of a rank with its number of threads."""
        self._spec = spec
        self._environment = rank_environment(threads_of(spec))
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._exited = self._loop.create_future()
        self.pid = 0
        self._wait: Callable[[], int] | None = None
        self._ordered = False
        self._ending = False
        self._telling: asyncio.TimerHandle | None = None
        stdin, lifeline = os.pipe()
        self._lifeline = os.fdopen(lifeline, "wb")
        self._forking: asyncio.Task[None] | None = None
        if fork_server is not None:
            self._forking = self._loop.create_task(self._fork(fork_server, stdin))
            return
        try:
            self._spawn(stdin)
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            os.close(stdin)

    def _spawn(self, stdin: int) -> None:
        process = subprocess.Popen(  # noqa: S603 - no outside input
            [sys.executable, "-m", RANK_MODULE],
            stdin=stdin,
            pass_fds=(self._spec.arena_fd,),
            env=self._environment,
            start_new_session=True,  # a terminal's Ctrl-C must reach only the engine
        )
        self._started(process.pid, process.wait)

    async def _fork(self, server: ForkServer, stdin: int) -> None:
        numbers = [0, 1, 2, self._spec.arena_fd]
        try:
            order = ForkOrder(folder=os.getcwd(), environment=self._environment, numbers=numbers)
            with await server.open() as channel:
                self._ordered = True
                pid = await server.fork(channel, order, [stdin, *numbers[1:]])
            self._started(pid, partial(_exit_code, pid))
        except (ForkServerLostError, OSError) as error:  # no descriptor, process or folder
            logger.warning("%s: a new process instead: %s", self._spec.name, error)
            try:
                self._spawn(stdin)
            except OSError as failure:
                logger.error("%s: cannot be started: %s", self._spec.name, failure)  # noqa: TRY400
                self._ended(1)
        finally:
            os.close(stdin)

    def _started(self, pid: int, wait: Callable[[], int]) -> None:
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # no file descriptor, so its exit would stay unnoticed
            os.kill(pid, signal.SIGKILL)
            wait()
            raise
        self.pid, self._wait = pid, wait
        with suppress(BrokenPipeError):  # it has ended already; `_reap` reports that
            self._lifeline.write(msgspec.json.encode(self._spec) + b"\n")
            self._lifeline.flush()
        self._loop.add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        assert self._wait is not None
        code = self._wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended(code)

    def _ended(self, code: int) -> None:
        with suppress(BrokenPipeError):
            self._lifeline.close()
        self._exited.set_result(code)
        if code in TOLD_CODES and not self._ending:
            self._telling = self._loop.call_later(LAST_WORD_S, self._on_exit, code)
        else:
            self._on_exit(code)

    async def wait_exit(self, *, grace_s: float) -> None:
        """Wait for the process to end; kill it after the grace period.

        An exit that waits for the rank's report is not reported any more.

        Blocks: at most the grace period, plus the time of a pending fork and of killing.
        """
        self._ending = True
        if self._telling is not None:
            self._telling.cancel()
        if self._forking is not None:
            if not self._ordered:
                self._forking.cancel()
            await asyncio.wait([self._forking])
        if self._wait is None:  # no process was started
            self._lifeline.close()
            return
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.shield(self._exited)
        except TimeoutError:
            if not self._exited.done():  # else it is reaped, and its id may be reused
                os.kill(self.pid, signal.SIGKILL)
            await asyncio.shield(self._exited)


def _exit_code(pid: int) -> int:
    """Reap a child that has ended; 0 if it was reaped already, as in `subprocess`."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status)


Modules = tuple[str, ...]
"""Names of modules, in the order of their import."""
OnExit = Callable[[int], None]
"""Called once, on the event loop, with the exit code of a rank."""


class LaunchedRank(Protocol):
    """A started rank."""

    @property
    def pid(self) -> int: ...

    async def wait_exit(self, *, grace_s: float) -> None:
        """Wait for the rank to end; kill it after the grace period."""


class Host(Protocol):
    """The place of the ranks of one start of a worker group.

    Attributes:
        name: Name for messages; empty for the engine's host.
    """

    @property
    def name(self) -> str: ...

    def open_link(self, group: str, on_frame: OnFrame) -> LeaderEnd:
        """Return the leader's end of a group, to which its ranks connect; `on_frame` gets their frames."""

    def launch(self, spec: RankSpec, on_exit: OnExit) -> LaunchedRank:
        """Start a rank without waiting for it; the host fills in its folder, arena and addresses."""

    def close(self) -> None:
        """Release the resources of links and ranks; all ranks have ended."""


class Launcher(Protocol):
    """Chooses the hosts of worker groups.

    Attributes:
        run_dir: A folder on the engine's host, removed when the launcher is closed.
    """

    @property
    def run_dir(self) -> str: ...

    def choose_host(
        self, groups: Sequence[str], arena: Arena, on_lost: Callable[[str], None]
    ) -> Host:
        """Return a host for one start of a worker group, whose ranks use `arena`.

        `on_lost` is called on the event loop, at most once, when the host is lost with all ranks, with a description.
        """

    def close(self) -> None:
        """Release everything; all ranks have ended."""


class OwnLauncher(ABC):
    """A launcher of ranks on its own host, which is never lost by itself."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self._starts: Counter[str] = Counter()

    def choose_host(
        self, groups: Sequence[str], arena: Arena, on_lost: Callable[[str], None]
    ) -> OwnHost:
        del on_lost
        self._starts.update(groups)
        return OwnHost(self, arena, self._starts[groups[0]])

    @abstractmethod
    def listen(self, address: str, on_frame: OnFrame) -> LeaderEnd:
        """Return the leader's end at an address, to which ranks connect."""

    @abstractmethod
    def start(self, spec: RankSpec, on_exit: OnExit) -> LaunchedRank:
        """Start a rank with a complete specification."""


class OwnHost:
    """The host of a launcher, for one start of a worker group."""

    name = ""

    def __init__(self, launcher: OwnLauncher, arena: Arena, start: int) -> None:
        """Prepare start number `start` of the worker group."""
        self._launcher = launcher
        self._arena = arena
        self._start = start

    def open_link(self, group: str, on_frame: OnFrame) -> LeaderEnd:
        return self._launcher.listen(self._address(group), on_frame)

    def launch(self, spec: RankSpec, on_exit: OnExit) -> LaunchedRank:
        return self._launcher.start(self._complete(spec), on_exit)

    def close(self) -> None:
        """No-op: leaders close their links."""

    def _address(self, group: str) -> str:
        return f"ipc://{Path(self._launcher.run_dir) / f'{group}-{self._start}'}"

    def _complete(self, spec: RankSpec) -> RankSpec:
        """Fill in the host's part of a specification: folder, arena, and the addresses of leaders and peers.

        Ranks that share a model use a new rendezvous for each start, because files of an earlier start would be
        mistaken for files of this one.
        """
        run_dir = self._launcher.run_dir
        changes: dict[str, Any] = {}
        for group, (stage, role) in zip(spec.groups, spec.roles.items(), strict=True):
            settings = role.settings
            if settings.ranks > 1:
                meeting = str(Path(run_dir) / f"{group}-{self._start}-collective")
                settings = dataclasses.replace(settings, rendezvous=meeting)
            changes[stage] = msgspec.structs.replace(
                role, address=self._address(group), settings=settings
            )
        return msgspec.structs.replace(spec, run_dir=run_dir, arena_fd=self._arena.fd, **changes)


class LocalLauncher(OwnLauncher):
    """Ranks as child processes, connected by ZeroMQ over sockets in a folder of this host.

    Ranks of plug-ins that allow it are forked from a process with their modules imported.
    """

    def __init__(
        self,
        run_dir: str = "",
        *,
        started: Mapping[Modules, ForkServer] | None = None,
    ) -> None:
        """Create a launcher; without `run_dir`, a temporary folder is created.

        `started` are started fork servers, by their imports, which this launcher takes over.

        Raises:
            ConfigError: When the path of a new folder is too long for a socket's address.
        """
        super().__init__(run_dir or make_socket_folder())
        # Lock against systemd-tmpfiles, which deletes files after some days without use, such as copies of adapters.
        folder = os.open(self.run_dir, os.O_RDONLY)
        self._locked = ExitStack()
        self._locked.callback(os.close, folder)
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(folder, fcntl.LOCK_SH)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._fork_servers = dict(started or {})

    def listen(self, address: str, on_frame: OnFrame) -> LeaderLink:
        # Temporary files of a long-running server may have been cleaned up.
        os.makedirs(self.run_dir, mode=0o700, exist_ok=True)
        return LeaderLink(self.context, address, on_frame)

    def start(self, spec: RankSpec, on_exit: OnExit) -> RankProcess:
        return RankProcess(spec, on_exit=on_exit, fork_server=self.fork_server(spec))

    def fork_server(self, spec: RankSpec) -> ForkServer | None:
        """Return the fork server with a rank's imports; None if one of its roles needs a new process."""
        roles = [(role.plugin, role.settings.device) for role in spec.roles.values()]
        modules = modules_of(spec.info, roles)
        if modules and modules not in self._fork_servers:
            self._fork_servers[modules] = ForkServer(modules)
        return self._fork_servers.get(modules)

    def close(self) -> None:
        for server in self._fork_servers.values():
            server.close()
        self.context.destroy(linger=0)
        self._locked.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)


def modules_of(info: ModelInfo, roles: Sequence[tuple[str, str]]) -> Modules:
    """Return the modules to import for roles (plug-in name and device); empty if one allows no imports."""
    modules: dict[str, None] = {}  # in the order of the plug-in
    for name, device in roles:
        needed = load_worker(name).forkable_modules(info, device)
        if not needed:
            return ()
        modules.update(dict.fromkeys(needed))
    return tuple(modules)


@contextmanager
def early_fork_servers(
    config: Config, idle: ForkServer | None = None
) -> Iterator[Mapping[Modules, ForkServer]]:
    """Start the fork server of a configuration's ranks, for a launcher to take over; leaving the context ends it.

    The imports of ranks are the longest part of a start. The command line calls this as soon as it has read its
    configuration; the engine's other imports, about a second on one core, run concurrently. Only for a process that
    runs nothing but the server, as with `forgo_models`.

    Its process is `idle`, if given, which the caller ends. Empty if ranks are not forked, or their imports are unknown
    because of an error, which the engine reports.
    """
    servers: dict[Modules, ForkServer] = {}
    with suppress(VschedError):
        modules = _modules_of_generate(config)
        if modules:
            servers[modules] = idle or ForkServer()
            servers[modules].begin_imports(modules)
        elif idle is not None:
            idle.close()
    try:
        yield servers
    finally:
        for server in servers.values():
            server.close()


def _modules_of_generate(config: Config) -> Modules:
    """Return the imports of ranks of the generate stage; the encode stage usually has the same.

    Raises:
        VschedError: When the plug-in does not exist, or the checkpoint cannot be served.
    """
    section = config.generate
    if not config.model.path or not section.on_cpu or config.cluster.elsewhere:
        return ()
    plugin = load_worker(section.plugin, path="generate.plugin")
    plugin.forgo_models(config.model.path)  # before anything looks for torch
    info = plugin.inspect(config.model.path, dtype=config.model.dtype, item_tokens_max=0)
    return modules_of(info, [(section.plugin, section.device)])
