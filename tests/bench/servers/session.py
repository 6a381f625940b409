"""Measurements of one command: checkpoint, server, load, storage of each run, and published tables."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop
from rich.console import Console

from tests.bench import report
from tests.bench.options import IMAGES, PAGES, SMOLLM2
from tests.bench.records import Key, Run, Started, Store
from tests.bench.servers import processes, sides
from tests.bench.servers.processes import neighbours
from tests.bench.servers.server import Server, ServerError, Spec, serving
from vsched.bench.load.client import BenchClient
from vsched.bench.load.generator import WARMUP, Figures, LoadPlan, draw, run_load, sessions_for
from vsched.bench.load.shapes import Case, shape_of
from vsched.bench.machine import OtherLoad, describe_machine
from vsched.errors import ConfigError

IMAGE_PIXELS = 448
LINE = 118
"""Maximum line length of a page."""
SETTLE_S = 1.0
"""Before the first request of a load."""
TIMEOUT_S = 600.0
"""Deadline for a request."""

Drive = Callable[..., Coroutine[Any, Any, Figures]]
"""Sends a load, given a client and `body`, and returns its figures."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Session:
    """Measurements of one command: their storage, keys and display.

    `settings` describes everything that figures depend on beyond their keys.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        store: Store,
        console: Console,
        *,
        checkpoint: str,
        settings: str,
    ) -> None:
        self.store = store
        self.console = console
        self.checkpoint = checkpoint
        self.settings = settings
        self._ready_s: float = options.ready_s
        self._idle_s: float = options.idle_s
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def key(self, plan: LoadPlan, spec: Spec, *, purpose: str, repeat: int, neighbours: int) -> Key:
        return Key(
            purpose=purpose,
            side=spec.side,
            case=plan.case,
            concurrency=plan.concurrency,
            repeat=repeat,
            checkpoint=self.checkpoint,
            settings=self.settings,
            neighbours=neighbours,
        )

    def missing(self, work: Mapping[Key, LoadPlan], spec: Spec) -> dict[Key, LoadPlan]:
        """Return the missing work of a side, and drop its runs of other versions: mixed tables mean nothing."""
        identity = (spec.side, self.checkpoint, self.settings)
        report = self.store.report
        report.runs = [
            run
            for run in report.runs
            if (run.key.side, run.key.checkpoint, run.key.settings) != identity
            or run.version == spec.version
        ]
        made = {run.key for run in report.runs}
        return {key: plan for key, plan in work.items() if key not in made}

    @contextlib.contextmanager
    def server(self, spec: Spec) -> Iterator[Server]:
        """Start a server, and measure its start."""
        if spec.prepare is not None:
            with self.console.status(f"preparing {self.checkpoint} for {spec.side}"):
                spec.prepare()
        log = self.store.folder / "logs" / f"{spec.side}-{self.checkpoint}.log"
        with serving(spec, log) as server:
            self._measure_start(server)
            yield server

    def _measure_start(self, server: Server) -> None:
        spec = server.spec
        with self.console.status(f"starting {spec.side}"):
            ready_s = server.wait_ready(self._ready_s)
            # A model with lazy loading loads for its first response.
            error = self._runner.run(self._first_answer(spec))
            if error is not None:
                raise ServerError(f"{spec.side}: the first request failed: {error}")
            answered_s = time.monotonic() - server.began_s
        with self.console.status(f"{spec.side} has nothing to do for {self._idle_s:g} s"):
            time.sleep(SETTLE_S)
            idle = server.idle_cores(self._idle_s)
            memory = processes.memory_mib(server.pids())
        started = Started(
            side=spec.side,
            checkpoint=self.checkpoint,
            settings=self.settings,
            version=spec.version,
            ready_s=round(ready_s, 2),
            answered_s=round(answered_s, 2),
            idle_cores=idle,
            memory_mib=memory,
            taken=now(),
        )
        self.store.report.starts.append(started)
        self.store.save()
        self.console.print(
            f"{spec.side}: ready after {ready_s:.1f} s, idle at {idle:.1%} of a core, "
            f"{sum(memory.values()):,.0f} MiB in {len(memory)} processes"
        )

    async def _first_answer(self, spec: Spec) -> str | None:
        client = BenchClient(spec.url, timeout_s=self._ready_s)
        body = spec.body([{"role": "user", "content": "hello"}], 4)
        return (await client.chat_when_ready(body)).error

    def measure(self, server: Server, drive: Drive, beside: Sequence[int] = ()) -> Figures:
        """Drive a load on a server; `beside` are the neighbours' process ids."""
        time.sleep(SETTLE_S)
        server.check_alive()
        watch = OtherLoad(lambda: [*beside, *server.pids()])
        client = BenchClient(server.spec.url, timeout_s=TIMEOUT_S)
        figures = self._runner.run(drive(client, body=server.spec.body))
        server.check_alive()  # failures of a server that has ended say nothing about its speed
        result = msgspec.structs.replace(figures, others=watch.cores())
        for text in result.errors:
            self.console.print(f"{server.spec.side}, {figures.case}: {text}", markup=False)
        return result

    def run_all(self, server: Server, work: Mapping[Key, LoadPlan]) -> None:
        """Run each plan on a server, and store the results."""
        for key, plan in work.items():
            busy = f" beside {key.neighbours}" if key.neighbours else ""
            title = f"{key.case} x {key.concurrency}{busy}, {key.repeat + 1}: {key.side}"
            drive = functools.partial(run_load, drawn=draw(plan), finished=lambda: None)
            with self.console.status(title), neighbours(key.neighbours) as pids:
                figures = self.measure(server, drive, pids)
            self.keep(key, server.spec, figures)
            result = f"{figures.requests_s:.2f} requests/s, failed {figures.failed}"
            self.console.print(f"{title}: {result}", markup=False)

    def keep(self, key: Key, spec: Spec, figures: Figures, rates: Sequence[float] = ()) -> None:
        self.store.add(
            Run(
                key=key,
                figures=figures,
                version=spec.version,
                taken=now(),
                load=round(os.getloadavg()[0], 2),
                rates=list(rates),
            )
        )


class Turn(NamedTuple):
    """One side in one round, with the session of its model and its loads."""

    session: Session
    spec: Spec
    work: dict[Key, LoadPlan]


def measure(
    turns: Sequence[Turn], console: Console, run: Callable[..., None] = Session.run_all
) -> list[str]:
    """Make the missing runs; return the sides that could not be measured.

    `run` is called with session, server and work of each turn.
    """
    left = deque(one._replace(work=one.session.missing(one.work, one.spec)) for one in turns)
    total = sum(len(one.work) for one in turns)
    failed: dict[str, None] = {}
    while left:
        to_make = sum(len(one.work) for one in left)
        session, spec, work = left.popleft()
        if not work:
            continue
        name = f"{spec.side} with {session.checkpoint}"
        console.print(f"{total - to_make} of {total} cells; now {name}", markup=False)
        try:
            with session.server(spec) as server:
                run(session, server, work)
        except (ServerError, ConfigError) as error:
            console.print(f"left out: {error}", markup=False)
            failed[name] = None
    return list(failed)


def check_complete(failed: Sequence[str], out: Path) -> None:
    """Raise an error that names the sides that could not be measured, if any."""
    if failed:
        raise ConfigError(
            f"not all was measured: {'; '.join(failed)}. Remedy: see the logs in {out / 'logs'}; "
            "the same command makes the missing runs, and --sides omits a side"
        )


def checkpoint_of(path: Path, console: Console) -> Path:
    """Return the folder of a checkpoint, created if missing."""
    if not (path / "config.json").exists():
        with console.status(f"making {path.name}"):
            command = [sys.executable, "-c", sides.ENTRY, "make-checkpoint", str(path)]
            made = ["--smollm2"] if path.name == SMOLLM2 else ["--size", path.name]
            subprocess.run([*command, *made], check=True)
    return path.resolve()


def machine() -> str:
    found = describe_machine(others=0.0)
    return f"{found.cores} cores of {found.processor}"


def plan_of(
    case: str,
    concurrency: int,
    *,
    words: int,
    tokens: int,
    sessions: int,
    seed: str,
    warmup: int = WARMUP,
) -> LoadPlan:
    kind = Case(case)
    shape = shape_of(kind, words=words, output_tokens=tokens, image_pixels=IMAGE_PIXELS, turns=1)
    return LoadPlan(
        case=kind,
        shape=shape,
        concurrency=concurrency,
        sessions=sessions_for(kind, concurrency, sessions),
        seed=seed,
        warmup=warmup,
    )


def context_line(machine: str, settings: str, runs: Sequence[Run]) -> str:
    """Describe the machine of some runs, the other load on it, the dates and the versions."""
    others = sorted(run.figures.others for run in runs)
    client = max(run.figures.client_cpu for run in runs)
    taken = sorted(run.taken for run in runs)
    versions = ", ".join(sorted({run.version for run in runs}))
    text = (
        f"{machine}; {versions}; {taken[0]} to {taken[-1]}; {settings}. "
        f"Other programs kept {others[len(others) // 2]:.2f} cores busy at the median, {others[-1]:.2f} at most; "
        f"the client at most {client:.0%} of one."
    )
    return textwrap.fill(text, LINE)


def publish(
    options: argparse.Namespace,
    name: str,
    parts: Sequence[str],
    pictures: dict[str, str],
    console: Console,
) -> None:
    """Write the tables to the folder of runs and, if requested, tables and pictures into the documentation."""
    text = "\n\n".join(parts)
    (options.out / f"{name}.md").write_text(text + "\n")
    console.print(text, markup=False, soft_wrap=True)
    if options.write_docs:
        for file in pictures:
            shutil.copyfile(options.out / file, IMAGES / file)
        shown = [f"![{caption}](../images/{file})" for file, caption in pictures.items()]
        report.write(report.holding(PAGES, name), name, "\n\n".join([*parts, *shown]))
