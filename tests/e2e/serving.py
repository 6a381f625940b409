"""`vsched serve` as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.e2e.conftest import SETTINGS
from tests.patience import PATIENCE_S
from tests.traces import parent, running


class ServeProcess:
    """A server with small settings, in a session of its own; it is killed at the end of a `with` block.

    Attributes:
        log: The lines of its standard error so far.
    """

    def __init__(
        self, checkpoint: Path, *arguments: str, settings: Sequence[str] = SETTINGS
    ) -> None:
        command = [sys.executable, "-c", "from vsched.cli.main import main; main()", "serve"]
        sets = [word for one in settings for word in ("--set", one)]
        self.process = subprocess.Popen(
            [*command, str(checkpoint), *arguments, *sets],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.log: list[str] = []
        self._url = ""
        self._ready = threading.Event()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "http://" in line and not self._url:
                self._url = "http://" + line.partition("http://")[2].split("/v1")[0]
                self._ready.set()
        self._ready.set()

    @property
    def url(self) -> str:
        """Base URL; blocks until the server is ready."""
        self._ready.wait(PATIENCE_S)
        assert self._url, "".join(self.log)
        return self._url

    @property
    def children(self) -> list[int]:
        """Its child processes."""
        return [one for one in running() if parent(one) == self.process.pid]

    def kill(self) -> None:
        """Kill it without a chance to clean up."""
        self.process.kill()
        self.process.wait()
        self._listener.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
