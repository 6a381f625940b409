"""Reports: tables, CSV, JSON and HTML say what was found, and nothing comes from a network."""

from __future__ import annotations

import csv
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from rich.console import Console

from tests.unit.sim.shapes import COST, SCARCE, config, scarce
from vsched.sim.fast.metrics import SimulationOutcome
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
from vsched.sim.report.html import render_html
from vsched.sim.report.svg import Chart, log_ticks, number, ticks


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


def printed(outcomes: list[SimulationOutcome]) -> str:
    text = StringIO()
    Console(file=text, width=140).print(comparison(outcomes))
    return text.getvalue()


def test_table_has_a_column_for_each_outcome(outcomes: list[SimulationOutcome]) -> None:
    text = printed(outcomes)
    assert re.search(r"chunk <aware> .* eager", text)
    for measure in MEASURES:
        assert measure.name in text
    first = outcomes[0].figures
    assert f"{first.ttft_ms.p95:,.1f}" in text
    assert re.search(rf"context_exceeded +│ +{first.failed['context_exceeded']} │", text)


def test_table_names_policies_that_failed(outcomes: list[SimulationOutcome]) -> None:
    broken = msgspec.structs.replace(
        outcomes[0], figures=msgspec.structs.replace(outcomes[0].figures, policy_faults={"Mine": 3})
    )
    assert re.search(r"failures of Mine +│ +3 │ +0 │", printed([broken, outcomes[1]]))


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
    write_csv(outcomes, path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["label"] for row in rows] == ["chunk <aware>", "eager"]
    for row, outcome in zip(rows, outcomes, strict=True):
        figures = outcome.figures
        assert float(row["TTFT p50, ms"]) == pytest.approx(figures.ttft_ms.p50, rel=1e-4)
        assert int(row["context_exceeded"]) == figures.failed["context_exceeded"]


def test_json_reads_as_it_was_written(outcomes: list[SimulationOutcome], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(outcomes, path)
    assert read_json(path) == outcomes


class Elements(HTMLParser):
    """Checks that what is opened is closed, and collects addresses."""

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


def test_html_is_whole_and_needs_nothing(outcomes: list[SimulationOutcome]) -> None:
    text = render_html(outcomes)
    elements = Elements()
    elements.feed(text)
    assert elements.open == []
    assert elements.addresses == []
    assert "<script" not in text
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "chunk &lt;aware&gt;" in text
    assert "chunk <aware>" not in text
    assert len(text) < 400_000


def test_html_charts_have_titles_units_and_legends(outcomes: list[SimulationOutcome]) -> None:
    text = render_html(outcomes)
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) == 3 + 4 + 7 + 2 * 2
    for chart in charts:
        words = [
            element.text or ""
            for element in ET.fromstring(chart).iter("{http://www.w3.org/2000/svg}text")
        ]
        assert len(words[0]) > 5, "a title"
        assert any(unit in words for unit in ("ms", "% of all", "requests", "images", "%")) or any(
            "token" in word or "%" in word for word in words
        )
    assert sum("eager" in chart for chart in charts) >= 14


def test_html_of_one_outcome_and_of_nothing(outcomes: list[SimulationOutcome]) -> None:
    assert "policies that differ" not in render_html(outcomes[:1])
    empty = simulate(config(), scarce(0, requests=0), cost=COST, label="empty")
    assert "<svg" in render_html([empty])


def test_chart_draws_within_its_frame() -> None:
    chart = Chart("title", x=(1, 100), y=(0, 10), x_label="x", y_label="y", log_x=True)
    chart.line([(0.1, -5), (10, 5), (1000, 50)], "red", "line")
    points = re.findall(r'points="([^"]*)"', chart.render())[0].split()
    places = [tuple(map(float, point.split(","))) for point in points]
    assert places[0] == (58.0, 224.0)
    assert places[1] == pytest.approx((58 + 388 / 2, (224 + 46) / 2))
    assert places[2] == (446.0, 46.0)


def test_ticks_are_round() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 3) == [3]
    assert log_ticks(1, 100) == [1, 2, 5, 10, 20, 50, 100]
    assert [number(value) for value in (0, 0.25, 12.345, 1234.5, 250_000)] == [
        "0",
        "0.25",
        "12.3",
        "1,234",
        "250k",
    ]
