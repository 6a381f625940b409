"""Where ranks come from, and how their leaders reach them: as processes of this host, by default.

A host is where the ranks of a worker group run: it has a folder for their sockets, and their arena. What depends on
that is filled in there (`at_home`), so a worker group says the same to every host.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from vsched.aio.leader.link import LeaderEnd
from vsched.aio.replicas.fork_server import ForkServer, IdleForkServer
from vsched.aio.replicas.process import RANK_COMMAND, RankProcess
from vsched.aio.replicas.rank_environment import rank_environment
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import LeaderLink, OnFrame, make_socket_folder
from vsched.types import ModelInfo, stage_of
from vsched.worker.capabilities import ForkableRanks
from vsched.worker.registry import load_worker
from vsched.worker.spec import EncodeRole, GenerateRole, RankSpec

OnExit = Callable[[int], None]
"""Called once, on the event loop, with the exit code of a rank that has ended."""


class LaunchedRank(Protocol):
    """A rank that was started."""

    @property
    def pid(self) -> int: ...

    async def end(self, *, grace_s: float) -> None:
        """Wait for the rank to end; kill it when it has not after the grace."""
        ...


class Host(Protocol):
    """Where the ranks of one start of a worker group run.

    Attributes:
        name: Of the host, for people; empty for the engine's own.
    """

    @property
    def name(self) -> str: ...

    def open_link(self, group: str, on_frame: OnFrame) -> LeaderEnd:
        """Return the leader's end of a group, to which its ranks can connect; `on_frame` gets what they say."""
        ...

    def launch(self, spec: RankSpec, *, threads: int, on_exit: OnExit) -> LaunchedRank:
        """Start a rank, without waiting for it; its folder, arena and addresses are the host's to say."""
        ...

    def close(self) -> None:
        """Give back what links and ranks met in; every rank has ended."""
        ...


class Launcher(Protocol):
    """Says where worker groups run.

    Attributes:
        run_dir: A folder of the engine's own host, gone when the launcher is closed.
    """

    @property
    def run_dir(self) -> str: ...

    def place(self, groups: Sequence[str], arena: Arena, on_lost: Callable[[str], None]) -> Host:
        """Return a host for one start of a worker group, whose ranks use `arena`.

        `on_lost` is called on the event loop, at most once, when the host is lost with all ranks, with a description.
        """
        ...

    def close(self) -> None:
        """Give everything back; every rank has ended."""
        ...


class LocalLauncher:
    """Ranks as child processes, and ZeroMQ over sockets in a folder of this host.

    Ranks whose plug-ins say what may be imported for them are forked from a process that has done so.
    """

    def __init__(
        self,
        run_dir: str = "",
        *,
        command: Sequence[str] = RANK_COMMAND,
        forked: bool = True,
        begun: Mapping[frozenset[str], ForkServer] | None = None,
    ) -> None:
        """Prepare; without a folder, one is made in the directory for temporary files.

        `command` are the arguments with which the interpreter becomes a rank. Without `forked`, each rank is a new
        process. `begun` are fork servers by what they import, which this launcher takes over.

        Raises:
            ConfigError: When the path of that would be too long for a socket's address.
        """
        self.run_dir = run_dir or make_socket_folder()
        self._command = command
        self._forked = forked
        self._fork_servers = dict(begun or {})
        self._starts: Counter[str] = Counter()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def place(
        self, groups: Sequence[str], arena: Arena, on_lost: Callable[[str], None]
    ) -> LocalHost:
        """Return this host, which is never lost."""
        del on_lost
        self._starts.update(groups)
        return LocalHost(self, groups, arena, self._starts[groups[0]])

    def open_link(self, address: str, on_frame: OnFrame) -> LeaderLink:
        """Bind a socket."""
        # A long-lived server's folder may have been swept from the temporary directory.
        os.makedirs(self.run_dir, mode=0o700, exist_ok=True)
        return LeaderLink(self._context, address, on_frame)

    def launch(self, spec: RankSpec, *, threads: int, on_exit: OnExit) -> RankProcess:
        """Start a process that has been told everything."""
        return RankProcess(
            spec,
            environment=rank_environment(threads),
            on_exit=on_exit,
            command=self._command,
            fork_server=self._fork_server(forkable_modules(spec)) if self._forked else None,
        )

    def _fork_server(self, modules: frozenset[str]) -> ForkServer | None:
        """Return the one that has imported these; None where that is nothing."""
        if modules and modules not in self._fork_servers:
            self._fork_servers[modules] = make_fork_server(modules)
        return self._fork_servers.get(modules)

    def close(self) -> None:
        """End the fork servers, close every socket and remove the folder."""
        for server in self._fork_servers.values():
            server.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self.run_dir, ignore_errors=True)


class LocalHost:
    """This host, for one start of a worker group."""

    name = ""

    def __init__(
        self, launcher: LocalLauncher, groups: Sequence[str], arena: Arena, start: int
    ) -> None:
        """Prepare the `start`-th start of these groups."""
        self._launcher = launcher
        self._groups = groups
        self._arena = arena
        self._start = start

    def open_link(self, group: str, on_frame: OnFrame) -> LeaderLink:
        """Bind the group's socket."""
        return self._launcher.open_link(
            link_address(self._launcher.run_dir, group, self._start), on_frame
        )

    def launch(self, spec: RankSpec, *, threads: int, on_exit: OnExit) -> RankProcess:
        """Start a process."""
        run_dir, arena = self._launcher.run_dir, self._arena
        spec = at_home(spec, self._groups, run_dir=run_dir, arena_fd=arena.fd, start=self._start)
        return self._launcher.launch(spec, threads=threads, on_exit=on_exit)

    def close(self) -> None:
        """There is nothing to give back: leaders close their links."""


def link_address(run_dir: str, group: str, start: int) -> str:
    """Return where the leader of a group listens in its `start`-th start."""
    return f"ipc://{Path(run_dir) / f'{group}-{start}'}"


def at_home(
    spec: RankSpec, groups: Sequence[str], *, run_dir: str, arena_fd: int, start: int
) -> RankSpec:
    """Return a specification with what its host says: folder, arena, and where leaders and peers are met.

    Ranks that share a model meet at a place that no earlier start has used: what it left there would be taken for this
    one's.
    """
    changes: dict[str, Any] = {}
    for group in groups:
        role: EncodeRole | GenerateRole = getattr(spec, stage_of(group))
        settings = role.settings
        if settings.ranks > 1:
            meeting = str(Path(run_dir) / f"{group}-{start}-collective")
            settings = dataclasses.replace(settings, rendezvous=meeting)
        changes[stage_of(group)] = msgspec.structs.replace(
            role, address=link_address(run_dir, group, start), settings=settings
        )
    return msgspec.structs.replace(spec, run_dir=run_dir, arena_fd=arena_fd, **changes)


def make_fork_server(modules: frozenset[str], *, idle: IdleForkServer | None = None) -> ForkServer:
    """Return a fork server for ranks that import these, which begins as `idle`; otherwise it has not started."""
    # With one thread, or libraries would start others as they are imported; ranks set their own number.
    environment = rank_environment(1)
    return ForkServer(sorted(modules), environment, idle)


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
