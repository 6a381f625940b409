"""Both servers running, with loads in turn; each run is stored immediately."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.bench.records import Key, Run, Started, Store
from tests.bench.servers import processes
from tests.bench.servers.neighbours import neighbours
from tests.bench.servers.server import IDLE_CORES_MAX, Server, ServerError, Spec, serving
from vsched.bench.load.client import BenchClient
from vsched.bench.load.generator import Figures, LoadPlan, draw, draw_text, run
from vsched.bench.machine import OtherLoad

SETTLE_S = 1.0
"""Between resuming a server and its first request."""

Drive = Callable[..., Coroutine[Any, Any, Figures]]
"""Sends a load, given a client and `body`, and returns its figures."""


def now() -> str:
    """Return the time as text."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Session:
    """Measurements of one command: their storage, keys and display.

    `settings` describes everything that figures depend on beyond their keys.
    """

    def __init__(
        self,
        store: Store,
        console: Console,
        *,
        checkpoint: str,
        settings: str,
        ready_s: float,
        idle_s: float,
        timeout_s: float,
    ) -> None:
        self.store = store
        self.console = console
        self.checkpoint = checkpoint
        self.settings = settings
        self._ready_s = ready_s
        self._idle_s = idle_s
        self._timeout_s = timeout_s
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def key(
        self,
        plan: LoadPlan,
        spec: Spec,
        *,
        purpose: str,
        repeat: int,
        length: int = 0,
        neighbours: int = 0,
    ) -> Key:
        """Return the key of a run."""
        return Key(
            purpose=purpose,
            side=spec.side,
            case=plan.case,
            concurrency=plan.concurrency,
            repeat=repeat,
            checkpoint=self.checkpoint,
            settings=self.settings,
            length=length,
            budget=spec.budget,
            neighbours=neighbours,
        )

    def missing(
        self, work: Mapping[tuple[Key, ...], LoadPlan], specs: Sequence[Spec]
    ) -> dict[tuple[Key, ...], LoadPlan]:
        """Return the missing work for servers of these versions."""
        versions = {spec.side: spec.version for spec in specs}
        self.store.drop_outdated(versions, self.checkpoint, self.settings)
        left = self.store.missing(work)
        return {keys: plan for keys, plan in work.items() if keys in left}

    @contextlib.contextmanager
    def servers(self, specs: Sequence[Spec]) -> Iterator[list[Server]]:
        """Start servers one after another and measure each start, with the earlier ones idle."""
        with contextlib.ExitStack() as stack:
            servers: list[Server] = []
            for spec in specs:
                for other in servers:
                    other.pause()
                if spec.prepare is not None:
                    with self.console.status(f"preparing {self.checkpoint} for {spec.side}"):
                        spec.prepare()
                name = f"{spec.side}-{self.checkpoint}-{spec.budget}.log"
                log = self.store.folder / "logs" / name
                servers.append(stack.enter_context(serving(spec, log)))
                self._measure_start(servers[-1])
            yield servers

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
        server.paused = spec.pausable and (spec.spins or idle > IDLE_CORES_MAX)
        started = Started(
            side=spec.side,
            checkpoint=self.checkpoint,
            settings=self.settings,
            budget=spec.budget,
            version=spec.version,
            command=spec.command,
            environment=spec.environment,
            ready_s=round(ready_s, 2),
            answered_s=round(answered_s, 2),
            idle_cores=idle,
            memory_mib=memory,
            paused=server.paused,
            taken=now(),
        )
        self.store.report.starts.append(started)
        self.store.save()
        self.console.print(
            f"{spec.side}: ready after {ready_s:.1f} s, idle at {idle:.1%} of a core, "
            f"{sum(memory.values()):,.0f} MiB in {len(memory)} processes"
            + ("; stopped when it is not its turn" if server.paused else "")
        )

    async def _first_answer(self, spec: Spec) -> str | None:
        client = BenchClient(spec.url, timeout_s=self._ready_s)
        body = spec.body([{"role": "user", "content": "hello"}], 4)
        return (await client.chat_when_ready(body)).error

    def ask_prompt_tokens(self, server: Server, words: int) -> int:
        """Return the number of tokens of a prompt of `words` random words."""
        text = draw_text(random.Random(words), words)
        body = server.spec.body([{"role": "user", "content": text}], 1)
        _let_go_on(server)
        client = BenchClient(server.spec.url, timeout_s=self._timeout_s)
        sample = self._runner.run(client.chat(body))
        server.pause()
        if sample.error is not None:
            raise ServerError(f"{server.spec.side}: {sample.error}")
        return sample.prompt_tokens

    def measure(
        self,
        server: Server,
        others: Sequence[Server],
        drive: Drive,
        beside: Sequence[int] = (),
    ) -> Figures:
        """Drive a load on a server while the others are idle; `beside` are the neighbours' process ids."""
        for other in others:
            other.pause()
        _let_go_on(server)
        server.check_alive()
        everyone = [server, *others]
        watch = OtherLoad(lambda: [*beside, *(pid for one in everyone for pid in one.pids())])
        waiting = processes.busy_cores([pid for one in others for pid in one.pids()])
        client = BenchClient(server.spec.url, timeout_s=self._timeout_s)
        figures = self._runner.run(drive(client, body=server.spec.body))
        server.check_alive()  # failures of a server that has ended say nothing about its speed
        result = msgspec.structs.replace(figures, others=watch.cores(), waiting=waiting())
        for text in result.errors:
            self.console.print(f"{server.spec.side}, {figures.case}: {text}", markup=False)
        return result

    def take_turns(
        self, servers: Sequence[Server], work: Mapping[tuple[Key, ...], LoadPlan]
    ) -> None:
        """Run each plan on every server, one after another, and store the results."""
        columns = (
            TextColumn("{task.description:<44}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            total = progress.add_task("all", total=len(work) * len(servers))
            for keys, plan in work.items():
                drawn = draw(plan)
                pairs = list(zip(servers, keys, strict=True))
                # The second one runs on a warm machine, so the order alternates.
                for server, key in pairs[:: -1 if keys[0].repeat % 2 else 1]:
                    others = [one for one in servers if one is not server]
                    long = f" of {key.length:,} tokens" if key.length else ""
                    busy = f" beside {key.neighbours}" if key.neighbours else ""
                    title = (
                        f"{key.case}{long} x {key.concurrency}{busy}, {key.repeat + 1}: {key.side}"
                    )
                    task = progress.add_task(title, total=plan.requests)
                    drive = functools.partial(
                        run, drawn=drawn, finished=functools.partial(progress.advance, task)
                    )
                    with neighbours(key.neighbours) as pids:
                        figures = self.measure(server, others, drive, pids)
                    self.keep(key, server.spec, figures)
                    progress.remove_task(task)
                    progress.advance(total)
                    progress.print(
                        f"{title}: {figures.requests_s:.2f} requests/s, failed {figures.failed}"
                    )

    def keep(self, key: Key, spec: Spec, figures: Figures) -> None:
        """Store a run."""
        load = round(os.getloadavg()[0], 2)
        run = Run(key=key, figures=figures, version=spec.version, taken=now(), load=load)
        self.store.add(run)


def _let_go_on(server: Server) -> None:
    """Resume a server, and give it the same time to settle as one that was never paused."""
    server.resume()
    time.sleep(SETTLE_S)
