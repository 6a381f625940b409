"""`vsched host` as a local process, at an address of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class HostProcess:
    """A host that can be killed, stopped and started again at the same address."""

    def __init__(
        self, name: str, ip: str, key: Path, *, port: int = 0, within: Sequence[str] = ()
    ) -> None:
        """Start it, at a free port unless one is given; `within` is a prefix of its command."""
        self.key = key
        self._name = name
        self._within = within
        self.address = f"tcp://{ip}:{port or free_port(ip)}"
        self.start()

    def start(self) -> None:
        options = ["--listen", self.address, "--key-file", str(self.key), "--name", self._name]
        command = [*self._within, sys.executable, "-m", "vsched", "host", *options]
        self._process = subprocess.Popen(command)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Stop it with SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue it with SIGCONT."""
        self._process.send_signal(signal.SIGCONT)


def free_port(ip: str) -> int:
    with socket.socket() as free:
        free.bind((ip, 0))
        return int(free.getsockname()[1])


@contextmanager
def running(*hosts: HostProcess) -> Iterator[None]:
    """Kill the hosts at the end."""
    try:
        yield
    finally:
        for host in hosts:
            host.kill()
