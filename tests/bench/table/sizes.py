"""Load of each cell of the table, and the remaining time of the table.

Three rounds of ten sides take about two and a half hours on two cores: a model that serves less
than one text per second gets few and short requests, because the third digit of a rate does not
matter here.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.bench.options import sizes_of
from tests.bench.records import Key, Run, Started
from tests.bench.sessions import plan_of
from vsched.bench.load.generator import LoadPlan

PURPOSE = "table"
WARMUP = 1
START_S = 40.0
"""Assumed duration of a start before one was measured."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The requests of a case; `sessions`, and the seconds they may take, by number of clients."""

    words: int
    tokens: int
    sessions: Mapping[int, int]
    seconds: Mapping[int, float]


SIZES: Mapping[str, Mapping[str, Size]] = {
    "tiny25": {
        "text": Size(
            words=120, tokens=128, sessions={1: 8, 8: 32, 32: 64}, seconds={1: 5, 8: 5, 32: 6}
        ),
        "image": Size(
            words=100, tokens=64, sessions={1: 8, 8: 24, 32: 64}, seconds={1: 5, 8: 6, 32: 10}
        ),
    },
    "mid25": {
        "text": Size(
            words=60, tokens=32, sessions={1: 3, 8: 8, 32: 32}, seconds={1: 10, 8: 12, 32: 25}
        ),
        "image": Size(
            words=50, tokens=32, sessions={1: 3, 8: 8, 32: 32}, seconds={1: 18, 8: 25, 32: 70}
        ),
        "video": Size(
            words=50, tokens=32, sessions={1: 3, 8: 8, 32: 32}, seconds={1: 20, 8: 30, 32: 90}
        ),
    },
    "smollm2": {
        "text": Size(
            words=120, tokens=64, sessions={1: 4, 8: 16, 32: 32}, seconds={1: 8, 8: 10, 32: 15}
        ),
    },
}


def sessions_at(size: Size, clients: int) -> int:
    """Return the sessions of a cell, also for a number of clients without an entry."""
    return size.sessions.get(clients, max(clients, min(size.sessions.values())))


def settings_of(options: argparse.Namespace, model: str) -> str:
    """Describe everything that figures of a model depend on except their side, whose settings are in its version."""
    parts = [sizes_of(options).text]
    sizes = {case: size for case, size in SIZES[model].items() if case in options.cases}
    for case, size in sizes.items():
        counts = ",".join(map(str, size.sessions.values()))
        parts.append(f"{case}={size.words}words/{size.tokens}tokens/{counts}")
    return " ".join(parts)


def plan_for(model: str, case: str, clients: int, repeat: int, neighbours: int = 0) -> LoadPlan:
    """Return the load of a cell in a round; prompts differ between numbers of neighbours."""
    size = SIZES[model][case]
    load = argparse.Namespace(
        words=size.words, output_tokens=size.tokens, turns=1, sessions=sessions_at(size, clients)
    )
    seed = f"{repeat} beside {neighbours}" if neighbours else str(repeat)
    plan = plan_of(load, case, clients, seed=seed, purpose=PURPOSE)
    return dataclasses.replace(plan, warmup=WARMUP)


def rest_s(
    missing: Sequence[Sequence[Key]], runs: Sequence[Run], starts: Sequence[Started]
) -> float:
    """Return the remaining seconds: those of each group of runs, with a start of its side.

    Estimates come from earlier runs of the same side, else of another side, else from the sizes.
    """
    mine: dict[tuple[str, str, str, int, int], float] = {}
    anyone: dict[tuple[str, str, int, int], list[float]] = {}
    for run in runs:
        key, figures = run.key, run.figures
        seconds = figures.wall_s + WARMUP * figures.wall_s * key.concurrency / figures.requests
        cell = (key.checkpoint, key.case, key.concurrency, key.neighbours)
        mine[key.side, *cell] = seconds
        anyone.setdefault(cell, []).append(seconds)
    started = {(one.side, one.checkpoint): one.answered_s for one in starts}
    total = 0.0
    for group in missing:
        for key in group:
            cell = (key.checkpoint, key.case, key.concurrency, key.neighbours)
            seconds = SIZES[key.checkpoint][key.case].seconds.get(key.concurrency, START_S)
            if cell in anyone:
                seconds = statistics.median(anyone[cell])
            total += mine.get((key.side, *cell), seconds)
        if group:
            total += started.get((group[0].side, group[0].checkpoint), START_S)
    return total
