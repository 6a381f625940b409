"""One server as a child process: start, readiness, idle measurement, and end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.servers import processes
from vsched.bench.load.client import chat_body
from vsched.bench.load.generator import fixed_length_fields
from vsched.errors import VschedError

HOST = "127.0.0.1"
POLL_S = 0.1
END_S = 30.0
LOG_LINES = 25


class ServerError(VschedError):
    """A server did not start, or ended unexpectedly."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Start command and requests of one side of a comparison.

    Attributes:
        side: The name of the side: `vsched`, or the name of the peer.
        model: Model name in requests.
        environment: Additional environment variables.
        prepare: Preparation before the start, unless done.
        directory: Working directory; `python -c` imports from there first.
        version: Its name and version.
    """

    side: str
    command: list[str]
    model: str
    port: int
    version: str
    environment: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None
    directory: Path | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def body(self, messages: list[dict[str, Any]], tokens: int) -> bytes:
        """Return the body of a request for exactly `tokens` output tokens."""
        return chat_body(self.model, messages, tokens, fixed_length_fields(tokens))


class Server:
    """A running server."""

    def __init__(self, spec: Spec, log: Path) -> None:
        """Start the server.

        Raises:
            ServerError: When another process listens on its port, which would be measured instead.
        """
        self.spec = spec
        self.log = log
        with socket.socket() as probe:
            if not probe.connect_ex((HOST, spec.port)):
                raise ServerError(
                    f"{spec.side}: another process listens on {HOST}:{spec.port} already. Remedy: end the server "
                    "that an earlier run left behind."
                )
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.environment},
                cwd=spec.directory,
                start_new_session=True,
            )
        self.began_s = time.monotonic()

    def pids(self) -> list[int]:
        return processes.family(self._process.pid)

    def wait_ready(self, deadline_s: float) -> float:
        """Wait until it reports healthy; return the seconds since its start.

        Raises:
            ServerError: When it ends, or is not ready in time.
        """
        while time.monotonic() - self.began_s < deadline_s:
            self.check_alive()
            if self._healthy():
                return time.monotonic() - self.began_s
            time.sleep(POLL_S)
        raise ServerError(
            f"{self.spec.side} is not ready after {deadline_s:g} s. Remedy: raise --ready-s, or see {self.log}"
        )

    def check_alive(self) -> None:
        """Raise an error with the end of the log if the server has ended."""
        if (status := self._process.poll()) is not None:
            end = "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:])
            raise ServerError(f"{self.spec.side} ended with status {status}; {self.log}:\n{end}")

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.spec.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def idle_cores(self, seconds: float) -> float:
        """Return the number of cores it keeps busy without a request."""
        pids, began_s = self.pids(), time.monotonic()
        spent_s = processes.cpu_s(pids)
        time.sleep(seconds)
        return round((processes.cpu_s(pids) - spent_s) / (time.monotonic() - began_s), 4)

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of a server of vsched."""
        with urllib.request.urlopen(f"{self.spec.url}/admin/statistics", timeout=30) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def end(self) -> None:
        """End it and all its processes."""
        processes.end(self._process, END_S)


@contextlib.contextmanager
def serving(spec: Spec, log: Path) -> Iterator[Server]:
    """Start a server, and always end it."""
    server = Server(spec, log)
    try:
        yield server
    finally:
        server.end()
