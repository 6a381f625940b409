"""One picture of a comparison, drawn with matplotlib of the extra `report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from vsched.sim.fast.metrics import SimulationOutcome
from vsched.sim.report.comparison import QUANTILES, TITLES

COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#475569")
POINTS_MAX = 320
"""Maximum number of points of a line; longer lines are drawn with every n-th point."""
SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,
    "font.size": 9,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
DrawChart = Callable[[Any], None]
"""Draws one chart on matplotlib's axes."""


def colour(index: int) -> str:
    """Return the colour of an outcome."""
    return COLOURS[index % len(COLOURS)]


def draw_picture(outcomes: Sequence[SimulationOutcome], path: Path) -> None:
    """Draw a PNG: time to first token, its distribution, time per token, and waiting requests."""
    first = outcomes[0]
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(10, 6), layout="constrained")
        figure.suptitle(
            f"{first.workload}: {first.figures.requests:,} requests, cost model {first.cost}"
        )
        charts = [
            bars(outcomes, "ttft"),
            distribution(outcomes, "ttft"),
            bars(outcomes, "tpot"),
            waiting(outcomes),
        ]
        for axes, draw in zip(figure.subplots(2, 2).flat, charts, strict=True):
            draw(axes)
        figure.savefig(path, dpi=100)


def bars(outcomes: Sequence[SimulationOutcome], name: str) -> DrawChart:
    """Return the chart of the quantiles of a duration, with a bar for each outcome."""

    def draw(axes: Any) -> None:
        width = 0.8 / len(outcomes)
        for index, outcome in enumerate(outcomes):
            spread = getattr(outcome.figures, f"{name}_ms")
            places = [place + (index - (len(outcomes) - 1) / 2) * width for place in range(3)]
            values = [getattr(spread, quantile) for quantile in QUANTILES]
            drawn = axes.bar(places, values, width * 0.95, color=colour(index), label=outcome.label)
            axes.bar_label(drawn, fmt="{:,.4g}", size=7)
        axes.set_xticks(range(3), QUANTILES)
        axes.set_ylabel("ms")
        axes.margins(y=0.2)
        _finish(axes, f"{TITLES[name]} (less is better)")

    return draw


def distribution(outcomes: Sequence[SimulationOutcome], name: str) -> DrawChart:
    """Return the chart of the cumulative distribution of a duration over requests or tokens."""

    def draw(axes: Any) -> None:
        if any(outcome.cdf[name] for outcome in outcomes):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:,g}")
            axes.xaxis.set_minor_locator(NullLocator())
        for index, outcome in enumerate(outcomes):
            points = outcome.cdf[name]
            shares = [share * 100 for _, share in points]
            times = [value for value, _ in points]
            axes.step(times, shares, where="post", color=colour(index), label=outcome.label)
        targets = {"ttft": outcomes[0].targets.ttft_ms, "tpot": outcomes[0].targets.tpot_ms}
        if name in targets and axes.get_xscale() == "log":
            axes.axvline(targets[name], color="grey", ls="--", lw=1, label="target")
        axes.set_xlabel("ms")
        axes.set_ylabel("% of all")
        _finish(axes, f"{TITLES[name]} (left is better)")

    return draw


def waiting(outcomes: Sequence[SimulationOutcome]) -> DrawChart:
    """Return the chart of waiting requests over time."""

    def draw(axes: Any) -> None:
        for index, one in enumerate(outcomes):
            values = one.series.gauges["waiting"]
            times = [(place + 1) * one.series.interval_s for place in range(len(values))]
            every = max(-(-len(values) // POINTS_MAX), 1)
            axes.plot(times[::every], values[::every], color=colour(index), lw=1.2, label=one.label)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("simulated s")
        axes.set_ylabel("requests")
        _finish(axes, "Requests that wait")

    return draw


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right")
