"""A process for starts, which is replaced when it hangs or dies, and whose output is read."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

from tests.e2e.fork_servers import one_fork_server
from tests.limits.attempt import Case, Outcome, attempt, judged
from tests.patience import PATIENCE_S

DEADLINE_S = 3 * PATIENCE_S
"""An attempt gives up by itself before that."""


class Worker:
    """Tries cases one after the other, in a process whose standard error is a file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._written = folder / "standard-error"
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._written), daemon=True)
        self._process.start()
        theirs.close()

    def attempt(self, case: Case) -> Outcome:
        """Return the outcome of a case.

        Blocks: up to `DEADLINE_S`.
        """
        self._pipe.send(case)
        try:
            if self._pipe.poll(DEADLINE_S):
                outcome, written = self._pipe.recv()
                return judged(outcome, written)
            verdict = Outcome("hang", "the engine's process")
        except (EOFError, ConnectionError):
            self._process.join()
            verdict = Outcome(
                "other error", f"the engine's process ended with {self._process.exitcode}"
            )
        self.close()
        self._begin()
        return verdict

    def close(self) -> None:
        """End the process, and with it its ranks."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def serve(pipe: Connection, written: Path) -> None:
    """Try cases from the pipe until it is closed."""
    with written.open("wb") as file:
        os.dup2(file.fileno(), 2)
    with one_fork_server():
        while True:
            try:
                case = pipe.recv()
            except EOFError:
                return
            before = written.stat().st_size
            outcome = asyncio.run(attempt(case))
            said = written.read_bytes()[before:].decode(errors="replace")
            pipe.send((outcome, said))
