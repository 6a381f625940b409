"""`vsched host` as a local process, at an address of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class HostProcess:
    """A host that can be killed and started again at the same address."""

    def __init__(self, name: str, ip: str, key: Path) -> None:
        """Start it at a free port."""
        self._key = key
        self._name = name
        self.address = f"tcp://{ip}:{free_port(ip)}"
        self.start()

    def start(self) -> None:
        options = ["--listen", self.address, "--key-file", str(self._key), "--name", self._name]
        command = [sys.executable, "-m", "vsched", "host", *options]
        self._process = subprocess.Popen(command)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.wait()


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
