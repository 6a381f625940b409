"""Reports: tables, CSV, JSON and HTML have the results, and nothing is loaded from a network."""

from __future__ import annotations

import csv
import re
import sys
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from rich.console import Console

from tests.unit.sim.shapes import COST, SCARCE, config, scarce
from vsched.errors import ConfigError
from vsched.sim.fast.metrics import SimulationOutcome, TenantFigures
from vsched.sim.fast.run import simulate
from vsched.sim.report.comparison import (
    MEASURES,
    best,
    comparison,
    differences,
    read_json,
    write_csv,
    write_json,
)
from vsched.sim.report.rendering import render_html, write_png

STAGES = ("generator", "encoder")
TITLES = {
    *(f"{name} (less is better)" for name in ("Time to first token", "Time per output token")),
    "From request to last token (less is better)",
    *(f"{name} (left is better)" for name in ("Time to first token", "Time per output token")),
    *(f"{name} (left is better)" for name in ("Between two tokens", "From request to last token")),
    *("Requests that wait", "Requests that run", "Images that wait for the encoder"),
    *("KV cache held", "Embedding pages in use", "Generators busy", "Encoders busy"),
    *(f"{name}: {stage} steps" for name in ("chunk <aware>", "eager") for stage in STAGES),
}


@pytest.fixture(scope="module")
def outcomes() -> list[SimulationOutcome]:
    settings = {"chunk <aware>": "chunk-aware", "eager": "eager"}
    return [
        simulate(
            config(*SCARCE, f"encode.encoding.use={use}", "generate.context_tokens=100"),
            scarce(3),
            cost=COST,
            label=label,
        )
        for label, use in settings.items()
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
    assert re.search(r"chunk <aware> .* eager", text)
    for measure in MEASURES:
        assert (measure.name in text) != measure.hosts
    first = outcomes[0].figures
    assert f"{first.ttft_ms.p95:,.1f}" in text
    assert re.search(rf"context_exceeded +│ +{first.failed['context_exceeded']} │", text)


def test_table_tells_of_links_where_there_are_other_hosts(
    outcomes: list[SimulationOutcome],
) -> None:
    figures = msgspec.structs.replace(outcomes[0].figures, link_bytes=1_500_000, link_busy=0.25)
    text = printed([msgspec.structs.replace(outcomes[0], figures=figures), outcomes[1]])
    assert re.search(r"to and from hosts, MB +│ +1\.5 │ +0\.0 │", text)
    assert re.search(r"busiest link busy +│ +25\.0% │ +0\.0% │", text)


def test_table_names_policies_that_failed(outcomes: list[SimulationOutcome]) -> None:
    broken = msgspec.structs.replace(
        outcomes[0], figures=msgspec.structs.replace(outcomes[0].figures, policy_faults={"Mine": 3})
    )
    assert re.search(r"failures of Mine +│ +3 │ +0 │", printed([broken, outcomes[1]]))


def with_tenants(outcome: SimulationOutcome) -> SimulationOutcome:
    figures = outcome.figures
    tenant = TenantFigures(
        requests=9,
        finished=7,
        output_tokens=70,
        ttft_ms=figures.ttft_ms,
        tpot_ms=figures.tpot_ms,
        good_share=0.5,
        failed={"shed": 2},
    )
    changed = msgspec.structs.replace(
        figures,
        failed={"shed": 2},
        reasons={"tenant [a] sends too fast": 2},
        policy_faults={"Mine": 3},
        tenants={"[a]": tenant},
    )
    return msgspec.structs.replace(
        outcome, figures=changed, policy_failures={"Mine": "Traceback of <Mine>"}
    )


def test_table_csv_and_html_tell_of_tenants_reasons_and_failures(
    outcomes: list[SimulationOutcome], tmp_path: Path
) -> None:
    reported = [with_tenants(outcomes[0]), outcomes[1]]
    text, html = printed(reported), render_html(reported)
    write_csv(reported, tmp_path / "out.csv")
    one, other = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    for name, value in {
        "shed: tenant [a] sends too fast": "2",
        "failures of policies": "3",
        "failures of Mine": "3",
        "[a]: finished": "7",
        "[a]: refused or failed": "2",
        "[a]: shed": "2",
    }.items():
        assert re.search(rf"{re.escape(name)} +│ +{value} │ +0 │", text)
        assert (one[name], other[name]) == (value, "0")
        assert name in html
    assert re.search(r"\[a\]: within targets +│ +50\.0% │ +0\.0% │", text)
    assert "Traceback of &lt;Mine&gt;" in html


def test_best_is_what_is_better_by_more_than_nothing(outcomes: list[SimulationOutcome]) -> None:
    def with_ttft(value: float) -> SimulationOutcome:
        figures = outcomes[0].figures
        spread = msgspec.structs.replace(figures.ttft_ms, p50=value)
        return msgspec.structs.replace(
            outcomes[0], figures=msgspec.structs.replace(figures, ttft_ms=spread)
        )

    measure = next(one for one in MEASURES if one.name == "TTFT p50, ms")
    assert best(measure, [with_ttft(10), with_ttft(12), with_ttft(10.01)]) == {0, 2}
    assert best(measure, [with_ttft(10), with_ttft(10)]) == set()
    assert best(measure, [with_ttft(10)]) == set()
    neither = next(one for one in MEASURES if not one.better)
    assert best(neither, outcomes) == set()


def test_differences_are_the_policies_that_differ(outcomes: list[SimulationOutcome]) -> None:
    assert differences(outcomes) == {
        "encode.encoding": ["ChunkAware(look_ahead_chunks=0)", "Eager()"]
    }


def test_csv_has_a_row_for_each_outcome(outcomes: list[SimulationOutcome], tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_csv(outcomes, str(path))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["label"] for row in rows] == ["chunk <aware>", "eager"]
    for row, outcome in zip(rows, outcomes, strict=True):
        figures = outcome.figures
        assert float(row["TTFT p50, ms"]) == pytest.approx(figures.ttft_ms.p50, rel=1e-4)
        assert int(row["context_exceeded"]) == figures.failed["context_exceeded"]


def test_json_reads_as_it_was_written(outcomes: list[SimulationOutcome], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(outcomes, str(path))
    assert read_json(str(path)) == outcomes


class Elements(HTMLParser):
    """Checks that every element is closed, and collects addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.addresses += [found[name] or "" for name in ("src", "href") if name in found]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.slow
def test_html_is_whole_and_needs_nothing(report: str) -> None:
    elements = Elements()
    elements.feed(report)
    assert elements.open == []
    assert elements.addresses == []
    assert "<script" not in report
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"']+", report)) == namespaces
    assert all(link.startswith("#") for link in re.findall(r'xlink:href="([^"]*)"', report))
    assert "chunk &lt;aware&gt;" in report
    assert "chunk <aware>" not in report
    assert len(report) < 400_000


@pytest.mark.slow
def test_html_charts_have_titles_units_and_legends(report: str) -> None:
    charts = re.findall(r"<svg.*?</svg>", report, re.DOTALL)
    assert len(charts) == 3 + 4 + 7 + 2 * 2
    for chart in charts:
        words = [
            element.text or ""
            for element in ET.fromstring(chart).iter("{http://www.w3.org/2000/svg}text")
        ]
        assert sum(word in TITLES for word in words) == 1, "a title"
        assert any(unit in words for unit in ("ms", "% of all", "requests", "images", "%")) or any(
            "token" in word or "%" in word for word in words
        )
    assert sum("eager" in chart for chart in charts) >= 14


def test_report_without_its_extra_names_it(
    outcomes: list[SimulationOutcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"--html: jinja2 .* pip install 'vsched\[report\]'"):
        render_html(outcomes)
    monkeypatch.delitem(sys.modules, "vsched.sim.report.charts", raising=False)
    monkeypatch.delattr("vsched.sim.report.charts", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"--plot: matplotlib"):
        write_png(outcomes, tmp_path / "out.png")


@pytest.mark.slow
def test_html_of_nothing_is_the_same_twice() -> None:
    empty = simulate(config(), scarce(0, requests=0), cost=COST, label="empty")
    html = render_html([empty])
    assert "<svg" in html
    assert "policies that differ" not in html
    assert render_html([empty]) == html
