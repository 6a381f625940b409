"""Where ranks come from, and how their leaders reach them: as processes of this host, by default."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import zmq

from vsched.aio.leader.link import LeaderEnd
from vsched.aio.replicas.fork_server import ForkServer
from vsched.aio.replicas.process import RANK_COMMAND, RankProcess, rank_environment
from vsched.transport.zmq_link import LeaderLink, OnFrame, make_socket_folder
from vsched.types import ModelInfo
from vsched.worker.capabilities import ForkableRanks
from vsched.worker.registry import load_worker
from vsched.worker.spec import RankSpec

OnExit = Callable[[int], None]
"""Called once, on the event loop, with the exit code of a rank that has ended."""


class LaunchedRank(Protocol):
    """A rank that was started."""

    @property
    def pid(self) -> int: ...

    async def end(self, *, grace_s: float) -> None:
        """Wait for the rank to end; kill it when it has not after the grace."""
        ...


class Launcher(Protocol):
    """Starts the ranks of an engine and opens the links to them.

    Attributes:
        run_dir: The folder that the addresses of links lie in.
    """

    @property
    def run_dir(self) -> str: ...

    def open_link(self, address: str, on_frame: OnFrame) -> LeaderEnd:
        """Return a leader's end, to which ranks can connect; `on_frame` gets what they say."""
        ...

    def launch(self, spec: RankSpec, *, threads: int, on_exit: OnExit) -> LaunchedRank:
        """Start a rank, without waiting for it."""
        ...

    def close(self) -> None:
        """Give back what links and ranks met in; every rank has ended."""
        ...


class LocalLauncher:
    """Ranks as child processes, and ZeroMQ over sockets in a folder of this host.

    Ranks whose plug-ins say what may be imported for them are forked from a process that has done so.
    """

    def __init__(
        self,
        run_dir: str = "",
        *,
        oversubscribed: bool = True,
        command: Sequence[str] = RANK_COMMAND,
        forked: bool = True,
        begun: Mapping[frozenset[str], ForkServer] | None = None,
    ) -> None:
        """Prepare; without a folder, one is made in the directory for temporary files.

        `oversubscribed`: the ranks have more threads than there are cores. `command` are the arguments with which
        the interpreter becomes a rank. Without `forked`, each rank is a new process. `begun` are fork servers by what
        they import, which this launcher takes over.

        Raises:
            ConfigError: When the path of that would be too long for a socket's address.
        """
        self.run_dir = run_dir or make_socket_folder()
        self.oversubscribed = oversubscribed
        self._command = command
        self._forked = forked
        self._fork_servers = dict(begun or {})
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def open_link(self, address: str, on_frame: OnFrame) -> LeaderLink:
        """Bind a socket."""
        # A long-lived server's folder may have been swept from the temporary directory.
        os.makedirs(self.run_dir, mode=0o700, exist_ok=True)
        return LeaderLink(self._context, address, on_frame)

    def launch(self, spec: RankSpec, *, threads: int, on_exit: OnExit) -> RankProcess:
        """Start a process."""
        return RankProcess(
            spec,
            environment=rank_environment(threads, oversubscribed=self.oversubscribed),
            on_exit=on_exit,
            command=self._command,
            fork_server=self._fork_server(forkable_modules(spec)) if self._forked else None,
        )

    def _fork_server(self, modules: frozenset[str]) -> ForkServer | None:
        """Return the one that has imported these; None where that is nothing."""
        if modules and modules not in self._fork_servers:
            self._fork_servers[modules] = make_fork_server(
                modules, oversubscribed=self.oversubscribed
            )
        return self._fork_servers.get(modules)

    def close(self) -> None:
        """End the fork servers, close every socket and remove the folder."""
        for server in self._fork_servers.values():
            server.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self.run_dir, ignore_errors=True)


def make_fork_server(modules: frozenset[str], *, oversubscribed: bool) -> ForkServer:
    """Return a fork server for ranks that import these; it has not started."""
    # With one thread, or libraries would start others as they are imported; ranks set their own number.
    return ForkServer(sorted(modules), rank_environment(1, oversubscribed=oversubscribed))


def forkable_modules(spec: RankSpec) -> frozenset[str]:
    """Return what may be imported before a rank is forked; empty where one of its roles needs a new process."""
    roles = [role for role in (spec.encode, spec.generate) if role is not None]
    return modules_of(spec.info, [(role.plugin, role.settings.device) for role in roles])


def modules_of(info: ModelInfo, roles: Sequence[tuple[str, str]]) -> frozenset[str]:
    """Return what may be imported for roles, each a plug-in's name and a device; empty where one allows nothing."""
    modules: set[str] = set()
    for name, device in roles:
        plugin = load_worker(name)
        needed = plugin.forkable_modules(info, device) if isinstance(plugin, ForkableRanks) else ()
        if not needed:
            return frozenset()
        modules.update(needed)
    return frozenset(modules)
