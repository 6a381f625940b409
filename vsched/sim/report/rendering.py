"""The report of a comparison: one self-contained HTML file, or one picture.

From top to bottom the report shows which configuration is better, for which tenant, when, and why:
first the tables, then latencies by percentile, then waiting requests, resource usage and the
contents of steps over time, then the slowest requests with their timelines. The file contains the
style and the chart library of the live page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import msgspec

from vsched.errors import ConfigError
from vsched.sim.fast.metrics import PHASES, SimulationOutcome, SlowRequest
from vsched.sim.report.comparison import (
    Measure,
    best,
    differences,
    measures_of,
    measures_of_tenant,
    tenants_of,
)
from vsched.sim.report.load import load_warning
from vsched.sim.report.page_data import chart_data, percentile_charts, time_charts

PAGE_FILES = "api/static"
FRAME_PIXELS = 800
SLOW_TITLES = {"ttft": "Longest time to first token", "tpot": "Longest time per output token"}


class Cell(NamedTuple):
    """A value of a table, with its change from the first outcome."""

    text: str
    change: str
    best: bool


class SlowRow(NamedTuple):
    """A slow request of an outcome, with the load when it was sent.

    Attributes:
        anchor: Id of its timeline in the page.
        longest: Its longest phase.
    """

    anchor: str
    request: SlowRequest
    longest: str
    waiting: float
    running: float


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


def render_html(outcomes: Sequence[SimulationOutcome]) -> str:
    """Return the report as HTML.

    Raises:
        ConfigError: When Jinja2 is not installed.
    """
    with _extra("--html"):
        import jinja2
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    own, page = files("vsched.sim.report"), files("vsched").joinpath(PAGE_FILES)
    template = environment.from_string(own.joinpath("report.html.jinja").read_text())
    slowest = [_slow_rows(index, outcome) for index, outcome in enumerate(outcomes)]
    return template.render(
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
        slowest=slowest,
        slow_titles=SLOW_TITLES,
        phases=PHASES,
        timelines=[{row.anchor: row for rows in one.values() for row in rows} for one in slowest],
        data=_for_script(msgspec.json.encode(chart_data(outcomes)).decode()),
        script=own.joinpath("report.js").read_text(),
        style=own.joinpath("report.css").read_text(),
        page_style=page.joinpath("style.css").read_text(),
        uplot=page.joinpath("vendor/uplot.js").read_text(),
        uplot_style=page.joinpath("vendor/uplot.css").read_text(),
        uplot_license=page.joinpath("vendor/uplot.LICENSE").read_text(),
    )


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


def _slow_rows(index: int, outcome: SimulationOutcome) -> dict[str, list[SlowRow]]:
    """Return the slowest requests of an outcome, by the keys of `SLOW_TITLES`."""
    return {
        by: [_slow_row(index, outcome, request) for request in outcome.slowest.get(by, ())]
        for by in SLOW_TITLES
    }


def _slow_row(index: int, outcome: SimulationOutcome, request: SlowRequest) -> SlowRow:
    gauges, phases = outcome.series.gauges, request.phases_ms
    last = len(gauges["waiting"]) - 1
    place = min(int(request.sent_s / outcome.series.interval_s), last)
    waiting, running = (gauges[name][place] if place >= 0 else 0 for name in ("waiting", "running"))
    longest = max(phases, key=phases.__getitem__)
    return SlowRow(f"request-{index}-{request.request_id}", request, longest, waiting, running)


def write_png(outcomes: Sequence[SimulationOutcome], path: str | os.PathLike[str]) -> None:
    """Draw the picture of a comparison.

    Raises:
        ConfigError: When matplotlib is not installed.
    """
    with _extra("--plot"):
        from vsched.sim.report import charts
    charts.draw_picture(outcomes, Path(path))


@contextmanager
def _extra(option: str) -> Iterator[None]:
    """Raise an error with install instructions if a library of the extra `report` is missing."""
    try:
        yield
    except ImportError as error:
        remedy = "Remedy: pip install 'vsched[report]'"
        raise ConfigError(f"{option}: {error.name} is not installed. {remedy}") from error
