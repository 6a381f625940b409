"""Objects in notebooks, and the example notebook.

Its cells are executed here as Jupyter executes them, one after another in one namespace, with the last expression
displayed: a kernel of Jupyter would be thirty more packages to install.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.sim.fast.test_recorded import load, record
from vsched.notebook import Statistics, html_table
from vsched.sim.report.rendering import ReportPage

NOTEBOOK = Path(__file__).parents[2] / "docs/examples/simulation.ipynb"


def run_cells(cells: list[dict[str, Any]]) -> list[Any]:
    """Execute the code cells; return the value that each displays."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body[-1]
            value = None
            if isinstance(last, ast.Expr):
                tree.body.pop()
                exec(compile(tree, "cell", "exec"), names)
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            else:
                exec(compile(tree, "cell", "exec"), names)
            shown.append(value)
    return shown


def test_example_notebook_runs_and_shows_its_results() -> None:
    pytest.importorskip("jinja2")
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    workload, outcome, table, report, other = run_cells(notebook["cells"])
    assert repr(workload) == "<Workload 'shared-prefixes' of 120 requests>"
    assert "120 of 120 in " in outcome._repr_html_()
    assert "Fifo(" in outcome._repr_html_()
    for shown, label in ((table, "shortest-first"), (other, "newest")):
        html = shown._repr_mimebundle_([], [])["text/html"]
        assert "TTFT p95, ms" in html
        assert label in html
    assert isinstance(report, ReportPage)
    frame = report._repr_html_()
    assert frame.startswith("<iframe srcdoc=")
    assert "uPlot" in frame
    assert frame.count('"') == 8, "a quote of the page ends the attribute"


def test_report_is_saved_as_it_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    outcome, _, _ = record(tmp_path, load())
    report = outcome.plot()
    report.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == report.page
    assert "TTFT p50" in repr(outcome)


def test_table_escapes_and_opens() -> None:
    html = html_table("a<b", {"x&y": {"inner": 12345}, "list": [1.5, "<i>"], "none": {}})
    assert "a&lt;b" in html
    assert "x&amp;y" in html
    assert "<details><summary>1</summary>" in html
    assert "12,345" in html
    assert "1.5, &lt;i&gt;" in html


def test_statistics_are_a_dictionary() -> None:
    found = Statistics(state="ready", running=3)
    assert msgspec.json.encode(found) == b'{"state":"ready","running":3}'
    assert "ready" in found._repr_html_()
