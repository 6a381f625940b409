"""`vsched host` as a process of this machine, at an address of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path


class HostProcess:
    """A host that can be killed, stopped and started again at the same address."""

    def __init__(self, name: str, ip: str, key: Path) -> None:
        self.key = key
        self._name = name
        with socket.socket() as free:
            free.bind((ip, 0))
            self.address = f"tcp://{ip}:{free.getsockname()[1]}"
        self.start()

    def start(self) -> None:
        """Start it."""
        options = ["--listen", self.address, "--key-file", str(self.key), "--name", self._name]
        self._process = subprocess.Popen([sys.executable, "-m", "vsched", "host", *options])

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
