"""Requests/s over time: each side is started once per round, and kept busy while a busy loop comes and goes."""

from __future__ import annotations

import argparse
import asyncio
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from tests.bench import report
from tests.bench.options import sizes_of
from tests.bench.records import Key, Run, Store
from tests.bench.servers.processes import neighbours
from tests.bench.servers.server import Server
from tests.bench.servers.session import (
    Session,
    Turn,
    check_complete,
    checkpoint_of,
    context_line,
    machine,
    measure,
    plan_of,
    publish,
)
from tests.bench.table import SIZES, specs_of
from vsched.bench.load.client import BenchClient, Sample
from vsched.bench.load.generator import Answers, Body, Figures, LoadPlan, Message, draw, summarise
from vsched.errors import ConfigError

PURPOSE = "timeline"
CASE, CLIENTS, NEIGHBOURS = "text", 8, 1
INTERVAL_S = 0.5
SETTLE_S = 2.0
"""Minimum time for clients to spread over prefill and decode before the first interval."""
SECONDS = (10, 20, 15)
"""Seconds before, with and after the neighbours."""
SESSIONS_S = {"tiny25": 40, "mid25": 10, "smollm2": 20}
"""Requests drawn per second: more than any side serves."""


def timeline(options: argparse.Namespace, console: Console) -> None:
    """Make the missing runs, and write all results.

    Raises:
        ConfigError: When a side could not be measured; all others have been by then.
    """
    store = Store(options.out)
    store.report.machine = machine()
    settings = settings_of(options)
    session = Session(options, store, console, checkpoint=options.checkpoint, settings=settings)
    failed = [] if options.report_only else measure(turns(options, session), console, run_side)
    write_timeline(options, session)
    check_complete(failed, options.out)


def settings_of(options: argparse.Namespace) -> str:
    """Describe everything that figures depend on beyond their keys."""
    size = SIZES[options.checkpoint][CASE]
    before, beside, after = SECONDS
    return (
        f"{sizes_of(options).text} {size.words}words/{size.tokens}tokens "
        f"{before} s quiet, {beside} s next to busy loops, {after} s quiet"
    )


def turns(options: argparse.Namespace, session: Session) -> list[Turn]:
    """Return all turns in order: rounds and sides, every other round in reverse order."""
    checkpoint = checkpoint_of(options.checkpoints / options.checkpoint, session.console)
    specs = specs_of(options, options.checkpoint, checkpoint)
    found = []
    for repeat in range(options.repeats):
        plan = plan_for(options, repeat)
        for spec in specs[:: -1 if repeat % 2 else 1]:
            at = {"repeat": repeat, "neighbours": NEIGHBOURS}
            work = {session.key(plan, spec, purpose=PURPOSE, **at): plan}
            found.append(Turn(session, spec, work))
    return found


def run_side(session: Session, server: Server, work: Mapping[Key, LoadPlan]) -> None:
    """Load a side while neighbours come and go, and store the run."""
    for key, plan in work.items():
        stamps: list[tuple[float, float]] = []
        sessions = [turns[0] for turns in draw(plan).sessions]
        drive = functools.partial(load, sessions=sessions, plan=plan, note=stamps.append)
        figures = session.measure(server, drive)
        session.keep(key, server.spec, figures, rates_of(stamps, sum(SECONDS)))


def plan_for(options: argparse.Namespace, repeat: int) -> LoadPlan:
    """Return the requests of a round, more than a side can serve."""
    size = SIZES[options.checkpoint][CASE]
    return plan_of(
        CASE,
        CLIENTS,
        words=size.words,
        tokens=size.tokens,
        sessions=SESSIONS_S[options.checkpoint] * sum(SECONDS),
        seed=f"{PURPOSE}/{repeat}",
    )


async def load(
    client: BenchClient,
    body: Body,
    *,
    sessions: Sequence[list[Message]],
    plan: LoadPlan,
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
            raise ConfigError(f"all {len(sessions)} requests ended too early")
        sample = await client.chat_when_ready(body(messages, length))
        samples.append(sample)
        wanted.append(length)
        return sample

    async def work(number: int, until_s: float) -> None:
        await ask(max(tokens * (number + 1) // clients, 1))
        while time.perf_counter() < until_s:
            await ask(tokens)

    before, beside, after = SECONDS
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
            with neighbours(NEIGHBOURS):
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


BACK_MIN = 0.95
"""Share of the rate before neighbours from which a side counts as recovered."""
WINDOW_S = 2.0
"""Averaging window for recovery, and for smoothing the picture."""

Seconds = tuple[int, int, int]


def write_timeline(options: argparse.Namespace, session: Session) -> None:
    store = session.store
    by_side = store.by_side(options.sides, PURPOSE, session.checkpoint, session.settings)
    if not by_side:
        return
    name = f"timeline-{options.checkpoint}"
    file = f"bench-{name}.png"
    title = f"{options.checkpoint}, {CASE} x {CLIENTS}, {NEIGHBOURS} busy loop for {SECONDS[1]} s"
    draw_rates(by_side, title, options.out / file)
    runs = [run for mine in by_side.values() for run in mine]
    parts = [
        f"{title}:",
        lines(by_side),
        f"Requests/s. *Back*: the mean of the next {WINDOW_S:g} s is {BACK_MIN} of the rate before, each round.",
        context_line(store.report.machine, session.settings, runs),
    ]
    publish(options, name, parts, {file: f"Requests over time: {title}"}, session.console)


def stretch_rates(rates: Sequence[float], seconds: Seconds) -> tuple[float, float, float]:
    """Return the mean rates before, with and after neighbours."""
    first, second = (_index(rates, seconds, sum(seconds[:count])) for count in (1, 2))
    before, beside, after = rates[:first], rates[first:second], rates[second:]
    return statistics.mean(before), statistics.mean(beside), statistics.mean(after)


def back_s(rates: Sequence[float], seconds: Seconds) -> float | None:
    """Return the seconds from the end of the neighbours until the rate has recovered; None if it does not."""
    before, _, _ = stretch_rates(rates, seconds)
    left = _index(rates, seconds, seconds[0] + seconds[1])
    window = _index(rates, seconds, WINDOW_S)
    for start in range(left, len(rates) - window + 1):
        if statistics.mean(rates[start : start + window]) >= BACK_MIN * before:
            return (start - left) * sum(seconds) / len(rates)
    return None


def _index(rates: Sequence[float], seconds: Seconds, second: float) -> int:
    return round(second * len(rates) / sum(seconds))


def lines(by_side: Mapping[str, Sequence[Run]]) -> str:
    headings = ("side", "before", "busy", "after", "kept", "back after, s", "failed", "rounds")
    rows = []
    for side, runs in by_side.items():
        found = [stretch_rates(run.rates, SECONDS) for run in runs]
        back = [back_s(run.rates, SECONDS) for run in runs]
        rows.append(
            [
                side,
                *(report.number(statistics.median(each)) for each in zip(*found, strict=True)),
                report.spread([beside / before for before, beside, _ in found if before] or [0.0]),
                ", ".join("not" if value is None else f"{value:.1f}" for value in back),
                str(sum(run.figures.failed for run in runs)),
                str(len(runs)),
            ]
        )
    return report.markdown(headings, rows)


def draw_rates(by_side: Mapping[str, Sequence[Run]], title: str, path: Path) -> None:
    """Draw requests/s over time, the median of the rounds; neighbours run in the grey interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for side, runs in by_side.items():
        rates = zip(*(run.rates for run in runs), strict=True)
        middle = [statistics.median(each) for each in rates]
        half = round(WINDOW_S / INTERVAL_S / 2)
        places = range(1, len(middle) + 1)
        smooth = [statistics.mean(middle[max(one - half, 0) : one + half]) for one in places]
        axes.plot([one * INTERVAL_S for one in places], smooth, linewidth=1.4, label=side)
    axes.axvspan(SECONDS[0], SECONDS[0] + SECONDS[1], color="grey", alpha=0.15)
    axes.set_title(title, size=9)
    axes.set_xlabel("s", size=8)
    axes.set_ylabel(f"requests/s, mean of {WINDOW_S:g} s", size=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)
