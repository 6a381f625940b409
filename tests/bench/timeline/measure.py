"""Rounds of the timeline: each side is started once per round, and kept busy while neighbours come and go."""

from __future__ import annotations

import argparse
import asyncio
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from tests.bench.options import sizes_of
from tests.bench.records import Key, Run, Store
from tests.bench.servers.neighbours import neighbours
from tests.bench.servers.server import ServerError, Spec
from tests.bench.servers.session import Session, now
from tests.bench.sessions import checkpoint_of, machine, plan_of
from tests.bench.table.measure import specs_of
from tests.bench.table.sizes import SIZES
from tests.bench.timeline import report
from vsched.bench.load.client import BenchClient, Sample
from vsched.bench.load.generator import Answers, Body, Figures, LoadPlan, Message, draw, summarise
from vsched.errors import ConfigError

PURPOSE = "timeline"
INTERVAL_S = 0.5
SETTLE_S = 2.0
"""Minimum time for clients to spread over prefill and decode before the first interval."""
SESSIONS_S = {"tiny25": 40, "mid25": 10, "smollm2": 20}
"""Requests drawn per second: more than any side serves."""


def timeline(options: argparse.Namespace, console: Console) -> None:
    """Make the missing runs, and write all results.

    Raises:
        ConfigError: When a side could not be measured; all others have been by then.
    """
    store = Store(options.out)
    store.report.machine = machine()
    session = Session(
        store,
        console,
        checkpoint=options.checkpoint,
        settings=settings_of(options),
        ready_s=options.ready_s,
        idle_s=options.idle_s,
        timeout_s=options.timeout_s,
    )
    failed = [] if options.report_only else measure(options, session)
    report.write(options, session)
    if failed:
        raise ConfigError(
            f"not all was measured: {'; '.join(failed)}. Remedy: see the logs in {options.out / 'logs'}; "
            "the same command makes the missing runs"
        )


def settings_of(options: argparse.Namespace) -> str:
    """Describe everything that figures depend on beyond their keys."""
    size = SIZES[options.checkpoint][options.case]
    before, beside, after = options.seconds
    return (
        f"{sizes_of(options).text} {size.words}words/{size.tokens}tokens "
        f"{before} s quiet, {beside} s next to busy loops, {after} s quiet"
    )


def measure(options: argparse.Namespace, session: Session) -> list[str]:
    """Make the missing runs; return the reasons why sides could not be measured."""
    checkpoint = checkpoint_of(options, session.console)
    specs = specs_of(options, options.checkpoint, checkpoint)
    failed: dict[str, None] = {}
    for repeat in range(options.repeats):
        plan = plan_for(options, repeat)
        for spec in specs[:: -1 if repeat % 2 else 1]:
            key = session.key(
                plan, spec, purpose=PURPOSE, repeat=repeat, neighbours=options.neighbours
            )
            if not session.missing({(key,): plan}, [spec]):
                continue
            try:
                measure_side(options, session, spec, key, plan)
            except (ServerError, ConfigError) as error:
                session.console.print(f"left out: {error}", markup=False)
                failed[f"{spec.side}: {error}"] = None
    return list(failed)


def measure_side(
    options: argparse.Namespace, session: Session, spec: Spec, key: Key, plan: LoadPlan
) -> None:
    """Start a side, load it while neighbours come and go, and store the run."""
    stamps: list[tuple[float, float]] = []
    drive = functools.partial(
        load,
        sessions=[turns[0] for turns in draw(plan).sessions],
        plan=plan,
        seconds=options.seconds,
        count=options.neighbours,
        note=stamps.append,
    )
    with session.servers([spec]) as (server,):
        figures = session.measure(server, [], drive)
    run = Run(
        key=key,
        figures=figures,
        version=spec.version,
        taken=now(),
        load=round(os.getloadavg()[0], 2),
        rates=rates_of(stamps, sum(options.seconds)),
    )
    session.store.add(run)
    session.console.print(
        f"{key.repeat + 1}: {spec.side}: {figures.requests} requests, failed {figures.failed}"
    )


def plan_for(options: argparse.Namespace, repeat: int) -> LoadPlan:
    """Return the requests of a round, more than a side can serve."""
    size = SIZES[options.checkpoint][options.case]
    wanted = options.sessions or SESSIONS_S[options.checkpoint] * sum(options.seconds)
    sizes = argparse.Namespace(
        words=size.words,
        output_tokens=size.tokens,
        turns=1,
        sessions=max(wanted, 2 * options.clients),
    )
    return plan_of(sizes, options.case, options.clients, seed=str(repeat), purpose=PURPOSE)


async def load(
    client: BenchClient,
    body: Body,
    *,
    sessions: Sequence[list[Message]],
    plan: LoadPlan,
    seconds: tuple[int, int, int],
    count: int,
    note: Callable[[tuple[float, float]], None],
) -> Figures:
    """Keep all clients busy while neighbours come and go; `note` is called with each piece of text.

    A piece is its second and its share of a request. The first outputs have different lengths, so
    that clients are spread evenly over prefill and decode instead of moving through them together.

    Raises:
        ConfigError: When the requests run out before the end.
    """
    tokens, clients = plan.shape.output_tokens, plan.concurrency
    requests: Iterator[list[Message]] = iter(sessions)
    samples: list[Sample] = []
    wanted: list[int] = []

    async def ask(length: int) -> Sample:
        messages = next(requests, None)
        if messages is None:
            raise ConfigError(
                f"all {len(sessions)} requests ended too early. Remedy: raise --sessions"
            )
        sample = await client.chat_when_ready(body(messages, length))
        samples.append(sample)
        wanted.append(length)
        return sample

    async def work(number: int, until_s: float) -> None:
        await ask(max(tokens * (number + 1) // clients, 1))
        while time.perf_counter() < until_s:
            await ask(tokens)

    before, beside, after = seconds
    await ask(tokens)
    first = len(samples)
    single_s = samples[0].ended - samples[0].started
    cpu_began = time.process_time()
    settled_s = max(SETTLE_S, 2 * single_s)
    began_s = time.perf_counter() + settled_s
    ends_s = began_s + before + beside + after
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(work(number, ends_s))
            await asyncio.sleep(settled_s + before)
            with neighbours(count):
                await asyncio.sleep(max(began_s + before + beside - time.perf_counter(), 0))
    except* ConfigError as errors:
        raise errors.exceptions[0] from None
    for sample in samples[first:]:
        for stamp in sample.stamps if sample.error is None else ():
            note((stamp - began_s, 1 / len(sample.stamps)))
    answers = Answers(
        sessions=[[sample] for sample in samples],
        tokens=wanted,
        wall_s=time.perf_counter() - began_s,
        cpu_s=time.process_time() - cpu_began,
    )
    return summarise(plan.case, clients, answers)


def rates_of(pieces: Sequence[tuple[float, float]], seconds: int) -> list[float]:
    """Return requests/s in each interval, from the second and the request share of each piece of text."""
    counts = [0.0] * math.ceil(seconds / INTERVAL_S)
    for second, share in pieces:
        if 0 <= second < seconds:
            counts[int(second / INTERVAL_S)] += share
    return [round(count / INTERVAL_S, 4) for count in counts]
