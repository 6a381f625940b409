"""Report of the curve: a line for each limit and each peer, the verdict on the target, and the picture."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from tests.bench.compare import context_line, publish
from tests.bench.records import Run
from tests.bench.report import tables
from tests.bench.report.plots import DPI
from tests.bench.servers.session import Session
from vsched.terminal.options import new_figure

PAUSE_MAX = 1.5
"""Maximum p99 inter-token latency, as a multiple of the best peer's."""
RATE_MIN = 0.95
"""Minimum request rate of a limit, as a share of the first point's."""
_PAUSE = tables.quantile("itl_ms", "p99")
_TIMES = tables.columns(
    ("ttft_ms", "p50"),
    ("ttft_ms", "p99"),
    ("itl_ms", "p50"),
    ("itl_ms", "p99"),
    ("itl_ms", "worst"),
)

Read = Callable[..., float | None]
Sides = dict[str, list[Run]]


def write(
    options: argparse.Namespace, session: Session, runs: Sequence[Run], console: Console
) -> None:
    """Write all results."""
    by_case = {case: sides_of(options, runs, case) for case in options.cases}
    by_case = {case: found for case, found in by_case.items() if options.points[0] in found}
    if not by_case:
        return
    name = f"curve-{options.checkpoint}"
    file = f"bench-{name}.png"
    title = f"{options.checkpoint}, {options.clients} clients"
    draw(by_case, options.points, title, options.out / file)
    parts = [
        *(lines(case, found, options.points) for case, found in by_case.items()),
        "Times in ms, medians of the rounds. A side of vsched is `generate.step_target_ms` and `step_target_ratio`.",
        "\n".join(verdict(case, found, options.points) for case, found in by_case.items()),
        context_line(session.store.report.machine, session.settings, runs),
    ]
    publish(options, name, parts, {file: f"Requests and pauses: {title}"}, console)


def sides_of(options: argparse.Namespace, runs: Sequence[Run], case: str) -> Sides:
    """Return the runs of a case by side, in the order of the options."""
    sides = [*options.points, *options.sides]
    found = {
        side: [run for run in runs if (run.key.side, run.key.case) == (side, case)]
        for side in sides
    }
    return {side: mine for side, mine in found.items() if mine}


def median(runs: Sequence[Run], read: Read) -> float:
    """Return the median over the rounds."""
    return statistics.median(value for run in runs if (value := read(run.figures)) is not None)


def rate(sides: Sides, side: str, base: str) -> float:
    """Return the request rate of a side relative to another's, the median over common rounds."""
    of_base = {run.key.repeat: run.figures.requests_s for run in sides[base]}
    return statistics.median(
        run.figures.requests_s / of_base[run.key.repeat]
        for run in sides[side]
        if run.key.repeat in of_base
    )


def least_pause(sides: Sides, points: Sequence[str]) -> float | None:
    """Return the lowest p99 inter-token latency of the peers."""
    return min(
        (median(runs, _PAUSE) for side, runs in sides.items() if side not in points), default=None
    )


def lines(case: str, sides: Sides, points: Sequence[str]) -> str:
    """Return the table of a case."""
    headings = (
        "case",
        "side",
        "requests/s",
        "of the first",
        *(name for name, _ in _TIMES),
        "rounds",
    )
    return tables.markdown(
        headings,
        [
            [
                case,
                f"vsched {side}" if side in points else side,
                tables.number(median(runs, tables.requests_s)),
                f"{rate(sides, side, points[0]):.2f}",
                *(tables.number(median(runs, read)) for _, read in _TIMES),
                str(len(runs)),
            ]
            for side, runs in sides.items()
        ],
    )


def verdict(case: str, sides: Sides, points: Sequence[str]) -> str:
    """Name the limits that meet the target: latency close to the best peer's, for a small loss of requests."""
    pause = least_pause(sides, points)
    if pause is None:
        return f"- {case}: no peer was measured."
    mine = [side for side in sides if side in points]
    short = [side for side in mine if median(sides[side], _PAUSE) <= PAUSE_MAX * pause]
    met = [side for side in short if rate(sides, side, points[0]) >= RATE_MIN]
    wanted = f"{PAUSE_MAX} times the best peer's p99 between tokens ({tables.number(pause)} ms)"
    if met:
        return f"- {case}: at most {wanted} for under {1 - RATE_MIN:.0%} of the requests: {', '.join(met)}."
    if short:
        cost = max(rate(sides, side, points[0]) for side in short)
        return f"- {case}: {wanted} costs {1 - cost:.0%} of the requests or more."
    return f"- {case}: no limit here comes to {wanted}."


def draw(by_case: dict[str, Sides], points: Sequence[str], title: str, path: Path) -> None:
    """Draw latency over request rate, a panel per case; the target is the corner below and right of the lines."""
    figure = new_figure(4.2 * len(by_case), 3.6)
    figure.suptitle(f"{title}: p99 between tokens over requests a second", size=10)
    grid = figure.subplots(1, len(by_case), squeeze=False)[0]
    for axes, (case, sides) in zip(grid, by_case.items(), strict=True):
        mine = [side for side in points if side in sides]
        places = {
            side: (median(runs, tables.requests_s), median(runs, _PAUSE))
            for side, runs in sides.items()
        }
        axes.plot(
            *zip(*(places[side] for side in mine), strict=True),
            marker="o",
            markersize=3,
            label="vsched",
        )
        for side, place in places.items():
            if side not in points:
                axes.plot(*place, marker="s", linestyle="", markersize=5, label=side)
                continue
            axes.annotate(side, place, size=6, xytext=(3, 3), textcoords="offset points")
        pause = least_pause(sides, points)
        if pause is not None:
            axes.axhline(PAUSE_MAX * pause, color="grey", linestyle=":", linewidth=1)
        axes.axvline(RATE_MIN * places[points[0]][0], color="grey", linestyle=":", linewidth=1)
        axes.set_yscale("log")
        axes.set_title(case, size=9)
        axes.set_xlabel("requests/s", size=8)
        axes.set_ylabel("ITL p99, ms", size=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=DPI)
