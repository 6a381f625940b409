"""Data of the report's charts, with the values of all outcomes at the same places."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from vsched.sim.fast.metrics import Series, SimulationOutcome, TenantFigures
from vsched.sim.report.comparison import tenants_of

TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e": "End to end: from sending to the last token",
    "itl": "Between two tokens",
}
PERCENTILES = (*range(1, 99), *(99 + tenth / 10 for tenth in range(10)), 99.95, 99.99)
Points = Sequence[tuple[float, float]]


class ReportChart(NamedTuple):
    """A chart: a line for each outcome.

    Attributes:
        x: `time` or `percentile`.
        values: A list for each outcome, of equal lengths, with None for missing values.
    """

    key: str
    title: str
    unit: str
    x: str
    values: list[list[float | None]]


def chart_data(outcomes: Sequence[SimulationOutcome]) -> dict[str, Any]:
    """Return the data of all charts, for the script of the page."""
    return {
        "labels": [one.label for one in outcomes],
        "percentiles": PERCENTILES,
        "times": times_of(outcomes),
        "charts": [
            chart._asdict() for chart in (*percentile_charts(outcomes), *time_charts(outcomes))
        ],
        "tenants": {
            tenant: {
                name: [_at_percentiles(_of_tenant(one, tenant).get(name, ())) for one in outcomes]
                for name in ("ttft", "tpot")
            }
            for tenant in tenants_of(outcomes)
        },
    }


def _of_tenant(outcome: SimulationOutcome, tenant: str) -> Mapping[str, Points]:
    figures: TenantFigures | None = outcome.figures.tenants.get(tenant)
    return {} if figures is None else figures.cdf


def percentile_charts(outcomes: Sequence[SimulationOutcome]) -> list[ReportChart]:
    """Return the charts of durations by percentile."""
    return [
        ReportChart(
            name,
            title,
            "ms",
            "percentile",
            [_at_percentiles(one.cdf.get(name, ())) for one in outcomes],
        )
        for name, title in TITLES.items()
    ]


def _at_percentiles(points: Points) -> list[float | None]:
    """Return the values of a cumulative distribution at `PERCENTILES`."""
    if not points:
        return [None] * len(PERCENTILES)
    shares = [share for _, share in points]
    places = (bisect_left(shares, percent / 100 - 1e-9) for percent in PERCENTILES)
    return [_short(points[min(place, len(points) - 1)][0]) for place in places]


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def times_of(outcomes: Sequence[SimulationOutcome]) -> list[float]:
    """Return the sample times of the charts over time, in seconds."""
    interval_s = _interval_s(outcomes)
    count = max(len(_merged(one.series, interval_s, "waiting")) for one in outcomes)
    return [_short((index + 1) * interval_s) for index in range(count)]


def time_charts(outcomes: Sequence[SimulationOutcome]) -> list[ReportChart]:
    """Return the charts over time: queues, memory, busy shares, and contents of steps."""
    interval_s = _interval_s(outcomes)
    length = len(times_of(outcomes))

    def chart(key: str, title: str, unit: str, values: Iterator[list[float]]) -> ReportChart:
        padded: list[list[float | None]] = [
            [*map(_short, one), *[None] * (length - len(one))] for one in values
        ]
        return ReportChart(key, title, unit, "time", padded)

    def gauge(key: str, title: str, unit: str, factor: float = 1.0) -> ReportChart:
        merged = (_merged(one.series, interval_s, key) for one in outcomes)
        return chart(key, title, unit, ([value * factor for value in one] for one in merged))

    def busy(key: str, title: str, stage: int) -> ReportChart:
        scales = (100 / (interval_s * 1e9) / max(one.groups[stage], 1) for one in outcomes)
        smooth = (_smooth(_merged(one.series, interval_s, key)) for one in outcomes)
        both = zip(smooth, scales, strict=True)
        return chart(key, title, "% of the time", ([v * scale for v in one] for one, scale in both))

    def per_step(key: str, title: str, steps: str) -> ReportChart:
        return chart(
            key,
            title,
            "tokens",
            (_ratio(one.series, interval_s, key, steps) for one in outcomes),
        )

    return [
        gauge("waiting", "Waiting requests", "requests"),
        gauge("running", "Running requests", "requests"),
        gauge("items_waiting", "Images waiting for the encoder", "images"),
        gauge("kv_held", "KV cache held", "%", 100),
        gauge("pages_used", "Embedding pages in use", "%", 100),
        busy("generate_busy_ns", "Generators busy", 1),
        busy("encode_busy_ns", "Encoders busy", 0),
        per_step("decode_tokens", "Decodes per generator step", "steps"),
        per_step("prefill_tokens", "Prefill tokens per generator step", "steps"),
        per_step("encode_tokens", "Image tokens per encoder step", "encode_steps"),
    ]


def _interval_s(outcomes: Sequence[SimulationOutcome]) -> float:
    """Return the longest sampling interval; the others divide it."""
    return max(one.series.interval_s for one in outcomes)


def _merged(series: Series, interval_s: float, name: str) -> list[float]:
    """Return a gauge or a counter at a multiple of its interval."""
    gauge = series.gauges.get(name)
    values: Sequence[float] = series.sums[name] if gauge is None else gauge
    size = round(interval_s / series.interval_s)
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(part) / (1 if gauge is None else len(part)) for part in parts]


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the running mean over a hundredth of the values."""
    window = max(len(values) // 100, 1)
    sums = [0.0, *accumulate(values)]
    return [
        (sums[index + 1] - sums[max(index + 1 - window, 0)]) / min(index + 1, window)
        for index in range(len(values))
    ]


def _ratio(series: Series, interval_s: float, of: str, by: str) -> list[float]:
    """Return the mean of a counter per step, with steps counted by another counter."""
    totals = _smooth(_merged(series, interval_s, of))
    steps = _smooth(_merged(series, interval_s, by))
    return [total / count if count else 0.0 for total, count in zip(totals, steps, strict=True)]
