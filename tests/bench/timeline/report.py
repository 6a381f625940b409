"""Report of the timeline: rates before, with and after neighbours, the recovery time, and the picture."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.records import Run
from tests.bench.report import tables
from tests.bench.report.pairs import spread
from tests.bench.report.plots import DPI
from tests.bench.servers.session import Session
from tests.bench.sessions import context_line, publish
from vsched.terminal.options import new_figure

BACK_MIN = 0.95
"""Share of the rate before neighbours from which a side counts as recovered."""
WINDOW_S = 2.0
"""Averaging window for recovery, and for smoothing the picture."""

Seconds = tuple[int, int, int]


def write(options: argparse.Namespace, session: Session) -> None:
    """Write all results."""
    by_side = {
        side: mine
        for side in options.sides
        if (
            mine := [
                run for run in session.store.report.runs if _belongs(run, options, session, side)
            ]
        )
    }
    if not by_side:
        return
    name = f"timeline-{options.checkpoint}"
    file = f"bench-{name}.png"
    title = (
        f"{options.checkpoint}, {options.case} x {options.clients}, {options.neighbours} busy "
        f"{'loop' if options.neighbours == 1 else 'loops'} for {options.seconds[1]} s"
    )
    draw(by_side, options.seconds, title, options.out / file)
    runs = [run for mine in by_side.values() for run in mine]
    parts = [
        f"{title}:",
        lines(by_side, options.seconds),
        f"Requests/s. *Back*: the mean of the next {WINDOW_S:g} s is {BACK_MIN} of the rate before, each round.",
        context_line(session.store.report.machine, session.settings, runs),
    ]
    publish(options, name, parts, {file: f"Requests over time: {title}"}, session.console)


def _belongs(run: Run, options: argparse.Namespace, session: Session, side: str) -> bool:
    key = run.key
    wanted = (side, options.case, options.clients, options.neighbours)
    return (
        (key.side, key.case, key.concurrency, key.neighbours) == wanted
        and (key.checkpoint, key.settings) == (session.checkpoint, session.settings)
        and bool(run.rates)
    )


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


def lines(by_side: Mapping[str, Sequence[Run]], seconds: Seconds) -> str:
    """Return the table: a line per side."""
    headings = (
        "side",
        "before",
        "busy",
        "after",
        "kept",
        "back after, s",
        "failed",
        "rounds",
    )
    rows = []
    for side, runs in by_side.items():
        found = [stretch_rates(run.rates, seconds) for run in runs]
        back = sorted(
            float("inf") if (after := back_s(run.rates, seconds)) is None else after for run in runs
        )
        rows.append(
            [
                side,
                *(tables.number(statistics.median(each)) for each in zip(*found, strict=True)),
                spread([beside / before for before, beside, _ in found if before] or [0.0]),
                ", ".join(f"{value:.1f}" if value < seconds[2] else "not" for value in back),
                str(sum(run.figures.failed for run in runs)),
                str(len(runs)),
            ]
        )
    return tables.markdown(headings, rows)


def draw(by_side: Mapping[str, Sequence[Run]], seconds: Seconds, title: str, path: Path) -> None:
    """Draw requests/s over time, the median of the rounds; neighbours run in the grey interval."""
    figure = new_figure(7, 3.6)
    axes = figure.subplots()
    for side, runs in by_side.items():
        middle = [
            statistics.median(each) for each in zip(*(run.rates for run in runs), strict=True)
        ]
        interval_s = sum(seconds) / len(middle)
        half = max(round(WINDOW_S / interval_s / 2), 1)
        smooth = [
            statistics.mean(middle[max(place - half, 0) : place + half])
            for place in range(1, len(middle) + 1)
        ]
        places = [place * interval_s for place in range(1, len(middle) + 1)]
        axes.plot(places, smooth, linewidth=1.4, label=side)
    axes.axvspan(seconds[0], seconds[0] + seconds[1], color="grey", alpha=0.15)
    axes.set_title(title, size=9)
    axes.set_xlabel("s", size=8)
    axes.set_ylabel(f"requests/s, mean of {WINDOW_S:g} s", size=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=DPI)
