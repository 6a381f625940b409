"""Gallery figures: latencies and goodput by tenant under each choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vsched.sim.fast.metrics import SimulationOutcome, TenantFigures
from vsched.sim.gallery.cases import COST, TARGETS, GalleryCase

BAR_COLUMNS = 30


class GalleryMeasure(NamedTuple):
    """The quantity in a panel, for each tenant."""

    title: str
    unit: str
    value: Callable[[TenantFigures], float]


_FIRST = "Time to first token, {} (less is better)"
_P50 = GalleryMeasure(_FIRST.format("p50"), "ms", lambda one: one.ttft_ms.p50)
_P95 = GalleryMeasure(_FIRST.format("p95"), "ms", lambda one: one.ttft_ms.p95)
_GOOD = GalleryMeasure(
    f"Within targets: {TARGETS.ttft_ms:,.0f} ms or its own, {TARGETS.tpot_ms:.0f} ms a token",
    "% of all sent",
    lambda one: 100 * one.good_share,
)


def measures_of(case: GalleryCase) -> tuple[GalleryMeasure, GalleryMeasure]:
    """Return the measures of a case; goodput is left out if nearly all requests meet the targets."""
    return (_P50, _P95) if case.in_time else (_P95, _GOOD)


def draw_case(case: GalleryCase, outcomes: Sequence[SimulationOutcome], path: Path) -> None:
    """Draw a PNG with a panel per measure, a group of bars per choice, and a bar per tenant; needs matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from vsched.sim.report.charts import SETTINGS, colour

    labels, measures = [one.label for one in outcomes], measures_of(case)
    height = 0.8 / len(case.shown)
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(10, 1.4 + 0.5 * len(outcomes)), layout="constrained")
        figure.suptitle(f"{case.title} (simulated, cost model {COST})")
        panels: Any = figure.subplots(1, len(measures), sharey=True)
        for axes, measure in zip(panels, measures, strict=True):
            for row, tenant in enumerate(case.shown):
                places = [index + (row + 0.5) * height - 0.4 for index in range(len(outcomes))]
                values = [measure.value(one.figures.tenants[tenant]) for one in outcomes]
                drawn = axes.barh(places, values, height * 0.95, color=colour(row), label=tenant)
                axes.bar_label(drawn, fmt="{:,.0f}", size=7, padding=2)
            axes.set_yticks(range(len(outcomes)), labels)
            axes.set_xlabel(measure.unit)
            axes.set_title(measure.title, size=9)
            axes.margins(x=0.15)
        panels[0].invert_yaxis()
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))
        figure.savefig(path, dpi=90)


def lines_of(case: GalleryCase, outcomes: Sequence[SimulationOutcome]) -> Iterator[str]:
    """Yield the same figures as lines of text."""
    yield f"{case.title} (simulated, cost model {COST})"
    width = max(len(one.label) for one in outcomes)
    names = max(len(tenant) for tenant in case.shown)
    for measure in measures_of(case):
        yield ""
        yield f"{measure.title}, {measure.unit}"
        values = [
            (one.label, tenant, measure.value(one.figures.tenants[tenant]))
            for one in outcomes
            for tenant in case.shown
        ]
        most = max(value for _, _, value in values) or 1.0
        for label, tenant, value in values:
            bar = "█" * round(BAR_COLUMNS * value / most)
            shown = label if tenant == case.shown[0] else ""
            yield f"  {shown:{width}}  {tenant:{names}} {value:>9,.0f} {bar}"
    yield ""
    yield "Answers overruled, and the longest time that a request was passed over"
    for one in outcomes:
        overruled = sum(one.figures.policy_overruled.values())
        yield f"  {one.label:{width}}  {overruled:>9,} {one.figures.passed_over_s:>9,.1f} s"
