"""The plot of a comparison: times, their distribution, and the waiting requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vsched.sim.report.svg import colour
from vsched.terminal.options import new_figure

if TYPE_CHECKING:
    from vsched.sim.fast.metrics import SimulationOutcome

QUANTILES = ("p50", "p95", "p99")


def draw(outcomes: Sequence[SimulationOutcome], path: Path) -> None:
    """Draw a PNG: time to first token, its distribution, time per token, and requests that wait.

    Raises:
        typer.BadParameter: When matplotlib is not installed.
    """
    figure = new_figure(10, 6)
    first = outcomes[0]
    figure.suptitle(
        f"{first.workload}: {first.figures.requests:,} requests, cost model {first.cost}", size=11
    )
    (bars, cdf), (tokens, waiting) = figure.subplots(2, 2)
    _bars(bars, outcomes, "ttft_ms", "time to first token")
    _cdf(cdf, outcomes)
    _bars(tokens, outcomes, "tpot_ms", "time per output token")
    _waiting(waiting, outcomes)
    for axes in (bars, cdf, tokens, waiting):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def _bars(axes: Any, outcomes: Sequence[SimulationOutcome], field: str, title: str) -> None:
    width = 0.8 / len(outcomes)
    for index, outcome in enumerate(outcomes):
        spread = getattr(outcome.figures, field)
        places = [place + (index - (len(outcomes) - 1) / 2) * width for place in range(3)]
        values = [getattr(spread, quantile) for quantile in QUANTILES]
        drawn = axes.bar(places, values, width * 0.95, color=colour(index), label=outcome.label)
        axes.bar_label(drawn, fmt="{:,.0f}", size=7)
    axes.set_xticks(range(3), QUANTILES)
    axes.set_title(f"{title} (less is better)", size=10)
    axes.set_ylabel("ms")
    axes.legend(fontsize=8)


def _cdf(axes: Any, outcomes: Sequence[SimulationOutcome]) -> None:
    for index, outcome in enumerate(outcomes):
        points = outcome.cdf["ttft"]
        values = [value for value, _ in points]
        shares = [share * 100 for _, share in points]
        axes.step(values, shares, where="post", color=colour(index), label=outcome.label)
    axes.axvline(outcomes[0].targets.ttft_ms, color="grey", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_title("time to first token, distribution (left is better)", size=10)
    axes.set_xlabel("ms; dashed: the target")
    axes.set_ylabel("% of requests")
    axes.legend(fontsize=8, loc="lower right")


def _waiting(axes: Any, outcomes: Sequence[SimulationOutcome]) -> None:
    for index, outcome in enumerate(outcomes):
        series = outcome.series
        values = series.gauges["waiting"]
        times = [(sample + 1) * series.interval_s for sample in range(len(values))]
        axes.plot(times, values, color=colour(index), linewidth=1, label=outcome.label)
    axes.set_title("requests that wait", size=10)
    axes.set_xlabel("simulated seconds")
    axes.set_ylabel("requests")
    axes.legend(fontsize=8)
