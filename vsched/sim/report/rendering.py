"""The report of a comparison: one self-contained HTML file that reads in a minute, or one picture.

From top to bottom the report shows which configuration is better, in which figure, when, and why:
first the table, then request latencies, then waiting requests and resource usage over time, then
the contents of steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from vsched.errors import ConfigError
from vsched.sim.fast.metrics import SimulationOutcome
from vsched.sim.report.comparison import best, differences, measures_of

TEMPLATE = "report.html.jinja"


def render_html(outcomes: Sequence[SimulationOutcome]) -> str:
    """Return the report as HTML.

    Raises:
        ConfigError: When Jinja2 or matplotlib is not installed.
    """
    with _extra("--html"):
        import jinja2

        from vsched.sim.report import charts
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(files("vsched.sim.report").joinpath(TEMPLATE).read_text())
    return template.render(
        outcomes=outcomes,
        first=outcomes[0],
        span_s=max(outcome.figures.span_s for outcome in outcomes),
        colours=[charts.colour(index) for index in range(len(outcomes))],
        differences=differences(outcomes),
        measures=[(measure, best(measure, outcomes)) for measure in measures_of(outcomes)],
        quantiles=[charts.as_svg(charts.bars(outcomes, name)) for name in ("ttft", "tpot", "e2e")],
        distributions=[
            charts.as_svg(charts.distribution(outcomes, name)) for name in charts.TITLES
        ],
        over_time=[charts.as_svg(draw) for draw in charts.over_time(outcomes)],
        steps=[charts.as_svg(draw) for draw in charts.steps_of(outcomes)],
    )


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
