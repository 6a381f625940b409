"""Trials of mutants: pytest collects once; every mutant meets the tests that reach it in a process forked from there.

A fork has imported and collected everything, so a mutant costs the time of its tests, and it leaves nothing behind. The
tests of a mutant run until one fails: first those that noticed others of its function, then the cheapest. A test that
takes ten times its usual processor time, or is silent for long, has noticed it as well: an endless loop is a change.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings

from tests.mutants.mutate import Mutant, plant, watch

SILENT_S = 60.0
"""A test that does not end within this time hangs."""
SLOWER = 10.0
MEMORY_BYTES = 2 << 30
"""Address space that a mutant may have in addition to its parent's."""
OPTIONS = (
    *("-q", "-s", "--tb=native", "-p", "no:cacheprovider", "-o", "timeout=0", "-m", "not slow"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # plug-ins are already imported here
)


class Known(NamedTuple):
    """Facts about a test: its processor time, and the statements that it reaches."""

    cpu_s: float
    reached: frozenset[tuple[str, int]]


class Verdict(NamedTuple):
    """The result of a mutant.

    Attributes:
        outcome: `killed`, `timeout`, `survived` or `unreached`.
        by: The test that noticed it.
        tests: Number of tests that reach it.
    """

    outcome: str
    by: str
    tests: int


class Trials:
    """Tries mutants in forks of a process that has collected the tests."""

    def __init__(self, items: Sequence[pytest.Item], places: tuple[str, ...]) -> None:
        self._items = list(items)
        self._places = places
        self._known: list[Known] = []
        self._kills: dict[str, Counter[int]] = {}

    def learn(self, on_test: Callable[[], None]) -> None:
        """Run every test once, in a fork, with nothing changed.

        Raises:
            RuntimeError: When one fails: it would notice every mutant.
        """
        for item, said in zip(
            self._items, self._fork(self._watched, range(len(self._items))), strict=True
        ):
            if said is None or said["failed"]:
                raise RuntimeError(f"fails with nothing changed: {item.nodeid}")
            reached = frozenset((place, line) for place, line in said["reached"])
            self._known.append(Known(said["cpu_s"], reached))
            on_test()

    def judge(self, mutant: Mutant) -> Verdict:
        """Try a mutant."""
        where = (mutant.place, mutant.line)
        chosen = [at for at, known in enumerate(self._known) if where in known.reached]
        # A test that has noticed others of this function is likely to notice this one.
        kills = self._kills.setdefault(mutant.place, Counter())
        chosen.sort(key=lambda at: self._known[at].cpu_s / (1 + 10 * kills[at]))
        if not chosen:
            return Verdict("unreached", "", 0)
        for at, said in zip(
            chosen, self._fork(lambda at: self._mutated(mutant, at), chosen), strict=True
        ):
            if said is None or said["failed"]:
                outcome = "timeout" if said is None else "killed"
                kills[at] += 1
                return Verdict(outcome, self._items[at].nodeid, len(chosen))
        return Verdict("survived", "", len(chosen))

    # --- in a fork ---

    def _fork(
        self, run: Callable[[Sequence[int]], Iterator[object]], chosen: Sequence[int]
    ) -> Iterator[dict[str, Any] | None]:
        """Yield a fork's result of each of the chosen tests; ends with None if it stops before the last."""
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            try:
                with open(writing, "w") as file, _alone():
                    for said in run(chosen):
                        file.write(json.dumps(said) + "\n")
                        file.flush()
            finally:
                os._exit(0)
        os.close(writing)
        try:
            with open(reading, "rb", buffering=0) as file:
                lines = _lines(file)
                for _ in chosen:
                    line = next(lines, None)
                    yield line
                    if line is None:
                        return
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)

    def _watched(self, chosen: Sequence[int]) -> Iterator[object]:
        reached = watch(self._places)
        for at in chosen:
            reached.clear()
            start_s = time.process_time()
            failed = self._run(at, chosen)
            cpu_s = time.process_time() - start_s
            yield {"failed": failed, "cpu_s": cpu_s, "reached": sorted(reached)}

    def _mutated(self, mutant: Mutant, chosen: Sequence[int]) -> Iterator[object]:
        plant(mutant)
        for at in chosen:
            # The signal ends the process.
            signal.setitimer(signal.ITIMER_PROF, 1.0 + SLOWER * self._known[at].cpu_s)
            yield {"failed": self._run(at, chosen)}

    def _run(self, at: int, chosen: Sequence[int]) -> bool:
        item = self._items[at]
        place = chosen.index(at) + 1
        following = self._items[chosen[place]] if place < len(chosen) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return item.session.testsfailed > 0


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Suppress output, and limit memory, so that a mutant that allocates without end fails."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for one in (1, 2):
        os.dup2(nothing, one)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    yield


def _lines(file: io.FileIO) -> Iterator[dict[str, Any]]:
    """Yield a fork's output line by line, until it ends or is silent for too long."""
    received = b""
    while select.select([file], [], [], SILENT_S)[0] and (more := file.read(1 << 16)):
        *lines, received = (received + more).split(b"\n")
        yield from map(json.loads, lines)


class Collected:
    """A pytest plug-in that passes the collected tests on instead of running them."""

    def __init__(self, work: Callable[[Sequence[pytest.Item]], None]) -> None:
        self._work = work
        self.error: Exception | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Replace the loop over the tests."""
        try:
            self._work(session.items)
        except Exception as error:  # noqa: BLE001 - pytest would make a report of it
            self.error = error
        return True


def with_tests(paths: Sequence[str], work: Callable[[Sequence[pytest.Item]], None]) -> None:
    """Collect tests, and do some work with them while pytest stands ready to run them."""
    # Shrinking a failing example would take too long.
    settings.register_profile(
        "mutants", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None
    )
    settings.load_profile("mutants")
    said, collected = io.StringIO(), Collected(work)
    with contextlib.redirect_stdout(said):
        status = pytest.main([*OPTIONS, *paths], plugins=[collected])
    if collected.error is not None:
        raise collected.error
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest could not collect {paths}:\n{said.getvalue()}")
