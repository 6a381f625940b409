"""Simulation charts, drawn with matplotlib: as SVG in the report, and combined in one picture.

Only reports import this module: matplotlib is in the extra `report`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from vsched.sim.fast.metrics import Series, SimulationOutcome

COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#475569")
DECODE, PREFILL, ENCODE = "#2563eb", "#f59e0b", "#16a34a"
POINTS_MAX = 320
"""Maximum number of points of a line; longer lines are drawn with every n-th point."""
QUANTILES = ("p50", "p95", "p99")
TITLES = {
    "ttft": "Time to first token",
    "itl": "Between two tokens",
    "tpot": "Time per output token",
    "e2e": "From request to last token",
}
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "vsched",  # makes the report reproducible byte by byte
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
WITHOUT_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
DrawChart = Callable[[Any], None]
"""Draws one chart on matplotlib's axes."""


def colour(index: int) -> str:
    """Return the colour of an outcome."""
    return COLOURS[index % len(COLOURS)]


def as_svg(draw: DrawChart) -> str:
    """Return a chart as an SVG element."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(4.6, 2.7), layout="constrained")
        draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=WITHOUT_METADATA)
    text = file.getvalue()
    return text[text.index("<svg") :].rstrip()


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
            over_time(outcomes)[0],
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


def over_time(outcomes: Sequence[SimulationOutcome]) -> list[DrawChart]:
    """Return the charts of waiting requests and resource usage over time."""

    def gauge(title: str, name: str, unit: str, factor: float = 1.0) -> DrawChart:
        def draw(axes: Any) -> None:
            for index, one in enumerate(outcomes):
                values = [value * factor for value in one.series.gauges[name]]
                _line(axes, one.series, values, colour(index), one.label)
            axes.set_ylabel(unit)
            _finish(axes, title)

        return draw

    def busy(title: str, name: str, stage: int) -> DrawChart:
        def draw(axes: Any) -> None:
            for index, one in enumerate(outcomes):
                scale = 100 / (one.series.interval_s * 1e9) / max(one.groups[stage], 1)
                values = [value * scale for value in _smooth(one.series, name)]
                _line(axes, one.series, values, colour(index), one.label)
            axes.set_ylabel("% of the time")
            _finish(axes, title)

        return draw

    return [
        gauge("Requests that wait", "waiting", "requests"),
        gauge("Requests that run", "running", "requests"),
        gauge("Images that wait for the encoder", "items_waiting", "images"),
        gauge("KV cache held", "kv_held", "%", 100),
        gauge("Embedding pages in use", "pages_used", "%", 100),
        busy("Generators busy", "generate_busy_ns", 1),
        busy("Encoders busy", "encode_busy_ns", 0),
    ]


def steps_of(outcomes: Sequence[SimulationOutcome]) -> Iterator[DrawChart]:
    """Yield the charts of step contents: generator and encoder steps of each outcome."""
    means = [
        (
            _mean(one.series, "decode_tokens", "steps"),
            _mean(one.series, "prefill_tokens", "steps"),
            _mean(one.series, "encode_tokens", "encode_steps"),
        )
        for one in outcomes
    ]
    tallest = max(
        (a + b for decode, prefill, _ in means for a, b in zip(decode, prefill, strict=True)),
        default=1.0,
    )
    encoded = max((value for *_, encode in means for value in encode), default=1.0)
    for one, (decode, prefill, encode) in zip(outcomes, means, strict=True):
        generator = {"decode": (decode, DECODE), "prefill": (prefill, PREFILL)}
        yield _stack(f"{one.label}: generator steps", one.series, generator, tallest)
        encoder = {"image tokens": (encode, ENCODE)}
        yield _stack(f"{one.label}: encoder steps", one.series, encoder, encoded)


def _stack(
    title: str, series: Series, layers: dict[str, tuple[list[float], str]], top: float
) -> DrawChart:
    def draw(axes: Any) -> None:
        every = _every(series)
        times = _times(series)[::every]
        values = [values[::every] for values, _ in layers.values()]
        colours = [fill for _, fill in layers.values()]
        if len(times) > 1:
            axes.stackplot(times, *values, labels=list(layers), colors=colours, alpha=0.75)
        axes.set_ylim(0, top * 1.05 or 1)
        axes.set_xlabel("simulated s")
        axes.set_ylabel("tokens a step")
        _finish(axes, title)

    return draw


def _line(axes: Any, series: Series, values: Sequence[float], stroke: str, label: str) -> None:
    every = _every(series)
    axes.plot(_times(series)[::every], values[::every], color=stroke, lw=1.2, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("simulated s")


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right")


def _times(series: Series) -> list[float]:
    count = len(series.gauges["waiting"])
    return [(index + 1) * series.interval_s for index in range(count)]


def _every(series: Series) -> int:
    return max(-(-len(series.gauges["waiting"]) // POINTS_MAX), 1)


def _smooth(series: Series, name: str) -> list[float]:
    """Return the running mean of a counter, over a hundredth of the samples."""
    values = series.sums[name]
    window = max(len(values) // 100, 1)
    sums = [0.0, *accumulate(values)]
    return [
        (sums[index + 1] - sums[max(index + 1 - window, 0)]) / min(index + 1, window)
        for index in range(len(values))
    ]


def _mean(series: Series, of: str, by: str) -> list[float]:
    """Return the mean of a counter per step, with steps counted by another counter."""
    totals, steps = _smooth(series, of), _smooth(series, by)
    return [total / count if count else 0.0 for total, count in zip(totals, steps, strict=True)]
