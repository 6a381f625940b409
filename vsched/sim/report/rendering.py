"""The report of a comparison: one self-contained HTML file, or one picture.

From top to bottom the report shows which configuration is better, for which tenant, when, and why:
first the tables, then latencies by percentile, then waiting requests, resource usage and the
contents of steps over time. The file contains the style and the chart library of the live page.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from vsched.errors import ConfigError
from vsched.kernel.commands import RefusalCode
from vsched.sim.fast.metrics import Series, SimulationOutcome, TenantFigures
from vsched.sim.report.comparison import (
    TITLES,
    Measure,
    best,
    differences,
    measures_of,
    measures_of_tenant,
    tenants_of,
)

GROWTH_MIN = 0.05
"""Share of the arrivals that stay in the queue, from which on the load counts as overload."""
WAITING_MIN = 10
"""Number of waiting requests below which a queue does not count as overload."""
REFUSED_MIN = 0.01
"""Share of requests refused by a full queue, from which on the load counts as overload."""
LENGTHS_MIN = 10
"""Duration of a workload, in median durations of a request, below which it is short."""


def load_warning(outcome: SimulationOutcome) -> str:
    """Return a sentence if the load exceeds the capacity, or if the workload is too short to say; else nothing."""
    return _full_queue(outcome) or _growing_queue(outcome) or _short_workload(outcome)


def _full_queue(outcome: SimulationOutcome) -> str:
    refused = outcome.figures.failed.get(RefusalCode.QUEUE_FULL, 0)
    if refused < max(REFUSED_MIN * outcome.figures.requests, 1):
        return ""
    return (
        f"Overload: the queue was full, and {refused:,} of {outcome.figures.requests:,} requests were refused. "
        "The latencies are those of the others."
    )


def _growing_queue(outcome: SimulationOutcome) -> str:
    """Compare the mean queue in each third of the time in which requests arrive."""
    figures, series = outcome.figures, outcome.series
    first_s, last_s = figures.arrivals_s
    start, stop = (int(at_s / series.interval_s) for at_s in figures.arrivals_s)
    waiting = series.gauges["waiting"][start : stop + 1]
    size = len(waiting) // 3
    if size == 0:
        return ""
    early, middle, late = (sum(waiting[size * k : size * (k + 1)]) / size for k in range(3))
    growth = min(middle - early, late - middle) / (figures.requests / 3)
    if growth < GROWTH_MIN or late < WAITING_MIN:
        return ""
    rate = figures.requests / (last_s - first_s)
    after_s = figures.span_s - (last_s - first_s)
    return (
        f"Overload: {rate:,.3g} requests arrived per second, and the queue grew by {growth * rate:,.2g} per second, to "
        f"{max(waiting):,.0f} requests; the last request ended {after_s:,.0f} s after the last arrival. "
        "A longer trace has higher latencies."
    )


def _short_workload(outcome: SimulationOutcome) -> str:
    figures = outcome.figures
    first_s, last_s = figures.arrivals_s
    median_s = figures.e2e_ms.p50 / 1e3
    if not figures.finished or last_s - first_s >= LENGTHS_MIN * median_s:
        return ""
    return (
        f"Short: requests arrived for {last_s - first_s:,.1f} s, and the median request took {median_s:,.1f} s. "
        "The trace may end before a steady state; a longer one can have higher latencies."
    )


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

    def chart(
        key: str, title: str, unit: str, of: Callable[[SimulationOutcome], Iterable[float]]
    ) -> ReportChart:
        columns: list[list[float | None]] = [[*map(_short, of(one))] for one in outcomes]
        padded = [[*column, *[None] * (length - len(column))] for column in columns]
        return ReportChart(key, title, unit, "time", padded)

    def merged(one: SimulationOutcome, key: str) -> list[float]:
        return _merged(one.series, interval_s, key)

    def gauge(key: str, title: str, unit: str, factor: float = 1.0) -> ReportChart:
        return chart(key, title, unit, lambda one: [v * factor for v in merged(one, key)])

    def busy(key: str, title: str, stage: int) -> ReportChart:
        def shares(one: SimulationOutcome) -> list[float]:
            scale = 100 / (interval_s * 1e9) / max(one.groups[stage], 1)
            return [value * scale for value in _smooth(merged(one, key))]

        return chart(key, title, "% of the time", shares)

    def per_step(key: str, title: str, steps: str) -> ReportChart:
        def ratios(one: SimulationOutcome) -> list[float]:
            totals, counts = (_smooth(merged(one, name)) for name in (key, steps))
            return [total / n if n else 0.0 for total, n in zip(totals, counts, strict=True)]

        return chart(key, title, "tokens", ratios)

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


PAGE_FILES = "api/static"
FRAME_PIXELS = 800


class Cell(NamedTuple):
    """A value of a table, with its change from the first outcome."""

    text: str
    change: str
    best: bool


class ReportPage:
    """The page of a comparison: a notebook shows it with its charts."""

    def __init__(self, outcomes: Sequence[SimulationOutcome]) -> None:
        self._labels = [one.label for one in outcomes]
        self.page = render_html(outcomes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page as one file, which loads nothing."""
        Path(path).write_text(self.page, encoding="utf-8")

    def __repr__(self) -> str:
        return f"<ReportPage of {', '.join(self._labels)}; save('report.html') writes it>"

    def frame(self) -> str:
        """Return the page as an HTML element in which its style and scripts stay apart from those of other pages."""
        return (
            f'<iframe srcdoc="{escape(self.page)}" title="Report" sandbox="allow-scripts" '
            f'style="width:100%;height:{FRAME_PIXELS}px;border:0"></iframe>'
        )

    _repr_html_ = frame


def load_jinja() -> ModuleType:
    """Return the template library.

    Raises:
        ConfigError: When it is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError(
            f"--html: {error.name} is not installed. Remedy: pip install 'vsched[report]'"
        ) from error
    return jinja2


def render_html(outcomes: Sequence[SimulationOutcome]) -> str:
    """Return the report as HTML.

    Raises:
        ConfigError: When Jinja2 is not installed.
    """
    jinja2 = load_jinja()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    own, page = files("vsched.sim.report"), files("vsched").joinpath(PAGE_FILES)
    template = environment.from_string(own.joinpath("report.html.jinja").read_text())
    page_text: str = template.render(
        outcomes=outcomes,
        first=outcomes[0],
        span_s=max(outcome.figures.span_s for outcome in outcomes),
        warnings=[(one.label, text) for one in outcomes if (text := load_warning(one))],
        differences=differences(outcomes),
        measures=_rows(measures_of(outcomes, with_tenants=False), outcomes),
        tenants={
            tenant: _rows(measures_of_tenant(tenant, outcomes), outcomes)
            for tenant in tenants_of(outcomes)
        },
        percentiles=percentile_charts(outcomes),
        over_time=time_charts(outcomes),
        data=_for_script(msgspec.json.encode(chart_data(outcomes)).decode()),
        script=own.joinpath("report.js").read_text(),
        style=own.joinpath("report.css").read_text(),
        page_style=page.joinpath("style.css").read_text(),
        uplot=page.joinpath("vendor/uplot.js").read_text(),
        uplot_style=page.joinpath("vendor/uplot.css").read_text(),
        uplot_license=page.joinpath("vendor/uplot.LICENSE").read_text(),
    )
    return page_text


def _for_script(json: str) -> str:
    """Return JSON that cannot end the script element that it stands in."""
    return json.replace("<", "\\u003c")


def _rows(
    measures: Sequence[Measure], outcomes: Sequence[SimulationOutcome]
) -> list[tuple[Measure, list[Cell]]]:
    """Return the rows of a table."""
    rows = []
    for measure in measures:
        winners = best(measure, outcomes)
        values = [measure.value(one.figures) for one in outcomes]
        cells = [
            Cell(
                measure.text.format(value),
                _change(value, values[0]) if index and measure.better else "",
                index in winners,
            )
            for index, value in enumerate(values)
        ]
        rows.append((measure, cells))
    return rows


def _change(value: float, first: float) -> str:
    """Return the change from the first outcome, unless it rounds to nothing."""
    change = value / first - 1 if first else 0.0
    if abs(change) < 0.005:
        return ""
    return f"{value / first:,.0f} times" if change >= 9 else f"{change:+.0%}"
