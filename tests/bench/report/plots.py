"""The pictures: request rates by concurrency, latencies by concurrency, and growth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.records import Run
from tests.bench.report.ratios import Read, Row
from tests.bench.report.tables import requests_s
from vsched.terminal.options import new_figure

COLOURS = ("tab:blue", "tab:orange")
STYLES = {"p50": "-", "p95": "--", "p99": ":"}
DPI = 90


def _points(runs: Sequence[Run], read: Read) -> tuple[float, float, float] | None:
    """Return median, minimum and maximum over the repeats."""
    values = [value for run in runs if (value := read(run.figures)) is not None]
    return (statistics.median(values), min(values), max(values)) if values else None


def _line(axes: Any, rows: Sequence[Row], index: int, read: Read, **style: Any) -> None:
    found = [
        (row.length or row.concurrency, points)
        for row in rows
        if (points := _points(row.theirs if index else row.ours, read)) is not None
    ]
    if not found:
        return
    places = [place for place, _ in found]
    middle, least, greatest = zip(*(points for _, points in found), strict=True)
    axes.plot(places, middle, color=COLOURS[index], marker="o", markersize=3, **style)
    if style.get("linestyle", "-") == "-":
        axes.fill_between(places, least, greatest, color=COLOURS[index], alpha=0.15)


def _ticks(axes: Any, rows: Sequence[Row], label: str) -> None:
    places = sorted({row.length or row.concurrency for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,}" for place in places], size=7)
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.tick_params(axis="y", which="both", labelsize=7)
    axes.set_xlabel(label, size=8)
    axes.grid(alpha=0.3)


def draw_rates(rows: Sequence[Row], sides: tuple[str, str], title: str, path: Path) -> None:
    """Draw request rates by concurrency, a panel per case; the band is the spread of the repeats."""
    cases = list(dict.fromkeys(row.case for row in rows))
    figure = new_figure(max(3 * len(cases), 4), 3.2)
    figure.suptitle(f"{title}: requests a second (more is better)", size=10)
    for axes, case in zip(_flat(figure.subplots(1, len(cases))), cases, strict=True):
        mine = [row for row in rows if row.case == case]
        for index, side in enumerate(sides):
            _line(axes, mine, index, requests_s, label=side)
        axes.set_title(case, size=9)
        axes.set_ylim(bottom=0)
        _ticks(axes, mine, "clients")
    _legend(axes, 8)
    figure.savefig(path, dpi=DPI)


def _legend(axes: Any, size: int) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=size)


def _flat(axes: Any) -> list[Any]:
    return list(axes.flat) if hasattr(axes, "flat") else [axes]
