"""Where ranks come from, and how their leaders reach them: as processes of this host, by default."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from vsched.aio.leader.link import LeaderEnd
from vsched.aio.replicas.process import RANK_COMMAND, RankProcess, rank_environment
from vsched.transport.zmq_link import LeaderLink, OnFrame, make_socket_folder
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
    """Ranks as child processes, and ZeroMQ over sockets in a folder of this host."""

    def __init__(
        self,
        run_dir: str = "",
        *,
        oversubscribed: bool = True,
        command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        """Prepare; without a folder, one is made in the directory for temporary files.

        `oversubscribed`: the ranks have more threads than there are cores. `command` are the arguments with which
        the interpreter becomes a rank.

        Raises:
            ConfigError: When the path of that would be too long for a socket's address.
        """
        self.run_dir = run_dir or make_socket_folder()
        self.oversubscribed = oversubscribed
        self._command = command
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def open_link(self, address: str, on_frame: OnFrame) -> LeaderLink:
        """Bind a socket."""
        # A long-lived server's folder may have been swept from the temporary directory.
        os.makedirs(self.run_dir, mode=0o700, exist_ok=True)
        return LeaderLink(self._context, address, on_frame)

    def launch(self, spec: RankSpec, *, threads: int, on_exit: OnExit) -> RankProcess:
        """Start a process."""
        environment = rank_environment(threads, oversubscribed=self.oversubscribed)
        return RankProcess(spec, environment=environment, on_exit=on_exit, command=self._command)

    def close(self) -> None:
        """Close every socket and remove the folder."""
        self._context.destroy(linger=0)
        shutil.rmtree(self.run_dir, ignore_errors=True)
