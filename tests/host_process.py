"""`vsched host` as a process of this machine, at an address of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from vsched.aio.hosts.remote import RemoteHost


class HostProcess:
    """A host that can be killed, stopped and started again at the same address."""

    def __init__(
        self, name: str, ip: str, key: Path, *, port: int = 0, within: Sequence[str] = ()
    ) -> None:
        """Start it, at a port that is free unless one is given; `within` is what a command begins with."""
        self.key = key
        self._name = name
        self._within = within
        self.address = f"tcp://{ip}:{port or free_port(ip)}"
        self.start()

    def start(self) -> None:
        """Start it."""
        options = ["--listen", self.address, "--key-file", str(self.key), "--name", self._name]
        command = [*self._within, sys.executable, "-m", "vsched", "host", *options]
        self._process = subprocess.Popen(command)

    def kill(self) -> None:
        """Kill it, as the system does."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Have it stand still."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Have it go on."""
        self._process.send_signal(signal.SIGCONT)


def free_port(ip: str) -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind((ip, 0))
        return int(free.getsockname()[1])


@contextmanager
def running(*hosts: HostProcess) -> Iterator[None]:
    """End hosts afterwards."""
    try:
        yield
    finally:
        for host in hosts:
            host.kill()


@contextmanager
def reached_at(addresses: Mapping[str, str]) -> Iterator[None]:
    """Have hosts reach each other at other addresses than those by which the engine knows them."""
    where = RemoteHost.where.fget  # type: ignore[attr-defined]

    def moved(host: RemoteHost) -> tuple[str, bytes]:
        address, key = where(host)
        return addresses.get(address, address), key

    with mock.patch.object(RemoteHost, "where", property(moved)):
        yield
