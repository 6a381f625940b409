"""Reports: tables, CSV, JSON and HTML have the results, and nothing is loaded from a network."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.unit.sim.shapes import COST, SCARCE, arrival, config, scarce
from vsched.errors import ConfigError
from vsched.sim.fast.metrics import GAUGES, SUMS, Series, SimulationOutcome, TenantFigures
from vsched.sim.fast.simulation import simulate
from vsched.sim.report.comparison import MEASURES, best, comparison
from vsched.sim.report.rendering import chart_data, load_warning, render_html
from vsched.sim.workload.requests import workload_of


@pytest.fixture(scope="module")
def outcomes() -> list[SimulationOutcome]:
    key, sets = "encode.encoding.look_ahead_chunks", [*SCARCE, "generate.context_tokens=100"]
    settings = {"chunk <aware>": f"{key}=0", "ahead": f"{key}=9"}
    return [
        simulate(config(*sets, chunks), scarce(3), cost=COST, label=label)
        for label, chunks in settings.items()
    ]


@pytest.fixture(scope="module")
def report(outcomes: list[SimulationOutcome]) -> str:
    return render_html(outcomes)


def printed(outcomes: list[SimulationOutcome]) -> str:
    text = StringIO()
    Console(file=text, width=140).print(comparison(outcomes))
    return text.getvalue()


def test_table_has_a_column_for_each_outcome(outcomes: list[SimulationOutcome]) -> None:
    text = printed(outcomes)
    assert re.search(r"chunk <aware> .* ahead", text)
    for measure in MEASURES:
        assert measure.name in text
    first = outcomes[0].figures
    assert f"{first.ttft_ms.p95:,.1f}" in text
    assert re.search(rf"context_exceeded +│ +{first.failed['context_exceeded']} │", text)


def with_tenants(outcome: SimulationOutcome, **more: Any) -> SimulationOutcome:
    figures = outcome.figures
    tenant = {
        "requests": 9,
        "finished": 7,
        "output_tokens": 70,
        "ttft_ms": figures.ttft_ms,
        "tpot_ms": figures.tpot_ms,
        "good_share": 0.5,
        "failed": {"shed": 2},
        **more,
    }
    changed = msgspec.structs.replace(
        figures,
        failed={"shed": 2},
        reasons={"tenant [a] sends too fast": 2},
        policy_faults={"Mine": 3},
        tenants={"[a]": TenantFigures(**tenant)},
    )
    return msgspec.structs.replace(
        outcome, figures=changed, policy_failures={"Mine": "Traceback of <Mine>"}
    )


def test_table_and_html_report_tenants_reasons_and_failures(
    outcomes: list[SimulationOutcome],
) -> None:
    reported = [with_tenants(outcomes[0]), outcomes[1]]
    text, html = printed(reported), render_html(reported)
    for name, value in {
        "shed: tenant [a] sends too fast": "2",
        "failures of policies": "3",
        "failures of Mine": "3",
        "[a]: finished": "7",
        "[a]: refused or failed": "2",
        "[a]: shed": "2",
    }.items():
        assert re.search(rf"{re.escape(name)} +│ +{value} │ +0 │", text)
        assert name.removeprefix("[a]: ") in html
    assert re.search(r"\[a\]: within targets +│ +50\.0% │ +0\.0% │", text)
    assert "Traceback of &lt;Mine&gt;" in html


def test_best_trial_must_be_measurably_better(outcomes: list[SimulationOutcome]) -> None:
    def with_ttft(value: float) -> SimulationOutcome:
        figures = outcomes[0].figures
        spread = msgspec.structs.replace(figures.ttft_ms, p50=value)
        changed = msgspec.structs.replace(figures, ttft_ms=spread)
        return msgspec.structs.replace(outcomes[0], figures=changed)

    measure = next(one for one in MEASURES if one.name == "TTFT p50, ms")
    for values, found in (([10, 12, 10.01], {0, 2}), ([10, 10], set()), ([10], set())):
        assert best(measure, [with_ttft(value) for value in values]) == found
    neither = next(one for one in MEASURES if not one.better)
    assert best(neither, outcomes) == set()


class Elements(HTMLParser):
    """Checks that every element is closed, and collects addresses and the texts of some elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.texts: dict[str, list[str]] = {"figcaption": [], "script": []}
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.addresses += [found[name] or "" for name in ("src", "href") if name in found]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] in self.texts:
            self.texts[self.open[-1]].append(text)


def test_html_is_whole_and_needs_nothing(
    report: str, outcomes: list[SimulationOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = Elements(report)
    assert set(elements.addresses) == {"data:,"}
    assert "default-src 'none'" in report
    assert set(re.findall(r"https?://[^\s\"')]+", report)) == {"https://github.com/leeoniya/uPlot"}
    assert "Permission is hereby granted" in report, "the licence of the chart library"
    assert "chunk &lt;aware&gt;" in report
    assert "chunk <aware>" not in report
    assert len(report) < 400_000
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"--html: jinja2 .* pip install 'vsched\[report\]'"):
        render_html(outcomes)


def test_html_charts_have_titles_units_and_values(
    report: str, outcomes: list[SimulationOutcome]
) -> None:
    elements = Elements(report)
    data = json.loads(elements.texts["script"][0])
    assert data["labels"] == ["chunk <aware>", "ahead"]
    charts = {chart["key"]: chart for chart in data["charts"]}
    assert len(charts) == len(elements.texts["figcaption"]) == 4 + 10
    for chart, caption in zip(charts.values(), elements.texts["figcaption"], strict=True):
        assert caption.startswith(chart["title"])
        assert chart["unit"] in caption.lower()
        lengths = len(data["times"] if chart["x"] == "time" else data["percentiles"])
        assert [len(values) for values in chart["values"]] == [lengths, lengths]
    at_95 = data["percentiles"].index(95)
    for values, outcome in zip(charts["ttft"]["values"], outcomes, strict=True):
        assert values[at_95] == pytest.approx(outcome.figures.ttft_ms.p95, rel=0.05)
    most = max(outcomes[0].series.gauges["waiting"])
    assert max(charts["waiting"]["values"][0]) == pytest.approx(most)


def test_html_compares_tenants_by_percentile(outcomes: list[SimulationOutcome]) -> None:
    first = with_tenants(outcomes[0])
    p99_ms = first.figures.ttft_ms.p99
    slow_ms = msgspec.structs.replace(outcomes[1].figures.ttft_ms, p99=2 * p99_ms)
    cdf: dict[str, list[tuple[float, float]]] = {"ttft": [(10.0, 0.5), (20.0, 1.0)]}
    html = render_html([first, with_tenants(outcomes[1], ttft_ms=slow_ms, cdf=cdf)])
    row = re.search(r"TTFT p99, ms</th>(.*)</tr>", html[html.index('aria-label="By tenant"') :])
    assert row is not None
    assert f"{p99_ms:,.1f}" in row[1]
    assert "<small>+100%</small>" in row[1]
    assert "<option>[a]</option>" in html
    data = json.loads(Elements(html).texts["script"][0])
    values = data["tenants"]["[a]"]["ttft"][1]
    percentiles = data["percentiles"]
    assert [values[percentiles.index(percent)] for percent in (50, 51)] == [10.0, 20.0]


@pytest.mark.parametrize(
    ("every_ms", "requests", "sets", "warning"),
    [
        (60.0, 300, (), r"^$"),
        (60.0, 4, (), r"^Short: requests arrived for 0.2 s"),
        (25.0, 300, (), r"^Overload: 40.1 requests arrived per second, and the queue grew by {grown}"),
        (25.0, 300, ("generate.max_waiting=5",), r"{refused} of 300 requests were refused"),
    ],
)  # fmt: skip
def test_load_that_no_figures_follow_from_is_named(
    every_ms: float, requests: int, sets: tuple[str, ...], warning: str
) -> None:
    """Of equal requests that arrive at a rate; a slot serves one in 40 ms."""
    arrivals = [arrival(number, number * every_ms, outputs=30) for number in range(requests)]
    steady, one_slot = workload_of("steady", arrivals), config("generate.slots=1", *sets)
    outcome = simulate(one_slot, steady, cost=COST, label="one")
    grown = f"[^(]*{max(outcome.series.gauges['waiting']):,.0f} requests"
    found = load_warning(outcome)
    refused = outcome.figures.failed.get("queue_full")
    assert re.search(warning.format(grown=grown, refused=refused), found)
    html = render_html([outcome])
    assert ('role="note"' in html) == bool(found)
    assert found in html


def test_charts_of_unequal_lengths_have_one_time_axis(outcomes: list[SimulationOutcome]) -> None:
    both = []
    for interval_s, waiting in ((0.05, [1.0, 3.0, 5.0]), (0.1, [2.0, 2.0, 8.0])):
        gauges, sums = dict.fromkeys(GAUGES, waiting), {key: [1, 2, 3] for key in SUMS}
        series = Series(interval_s=interval_s, gauges=gauges, sums=sums)
        both.append(msgspec.structs.replace(outcomes[0], series=series))
    data = chart_data(both)
    chart = next(chart for chart in data["charts"] if chart["key"] == "waiting")
    assert data["times"] == [0.1, 0.2, 0.3]
    assert chart["values"] == [[2, 5, None], [2, 2, 8]]
