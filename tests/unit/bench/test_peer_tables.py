"""Results of the bench harness: figures, ratios, tables, and parts of a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import report
from tests.bench.options import PAGES, TABLED
from tests.bench.records import Key, Run
from tests.bench.report import rows
from vsched.bench.load.generator import Figures, Times


def figures_of(rate: float, *, failed: int = 0, ttft: float | None = None) -> Figures:
    ttft_ms = None if ttft is None else Times(p50=ttft, p95=ttft, p99=ttft, mean=ttft, worst=ttft)
    return Figures(
        requests=8,
        failed=failed,
        errors=[],
        wrong_length=0,
        wall_s=1,
        requests_s=rate,
        output_tokens_s=rate * 10,
        prompt_tokens_s=rate * 5,
        prompt_tokens_mean=5,
        output_tokens_mean=10,
        pieces_mean=9,
        ttft_ms=ttft_ms,
        itl_ms=None,
        tpot_ms=None,
        request_ms=None,
        client_cpu=0.1,
    )


def run_of(
    side: str,
    rate: float,
    *,
    case: str = "text",
    concurrency: int = 8,
    repeat: int = 0,
    failed: int = 0,
    ttft: float | None = None,
) -> Run:
    key = Key(
        purpose="compare",
        side=side,
        case=case,
        concurrency=concurrency,
        repeat=repeat,
        checkpoint="tiny25",
        settings="",
    )
    figures = figures_of(rate, failed=failed, ttft=ttft)
    return Run(key=key, figures=figures, version="v1", taken="t", load=0)


# --- ratios ---


def test_ratio_is_of_each_pair() -> None:
    """A noisy minute that halves both runs of a pair leaves its ratio."""
    ours = [run_of("vsched", rate, repeat=index) for index, rate in enumerate((30, 15, 44))]
    theirs = [run_of("vllm", rate, repeat=index) for index, rate in enumerate((20, 10, 22))]
    (row,) = rows(ours, theirs, ["text"])
    ratio = row.ratio(report.requests_s)
    assert ratio is not None
    assert (ratio.median, ratio.least, ratio.greatest) == (1.5, 1.5, 2.0)
    assert row.medians(report.requests_s) == (30, 20)
    assert ratio.text == "1.50 (1.50 to 2.00)"


# --- the page ---

PAGE = "# Title\n\n<!-- bench: one -->\nold\n<!-- end: one -->\n\nrest\n"


def test_page_replaces_what_lies_between_its_markers(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    report.write(path, "one", r"new \1 text")
    expected = PAGE.replace("old\n", "\nnew \\1 text\n\n")
    assert path.read_text() == expected
    report.write(path, "one", r"new \1 text")
    assert path.read_text() == expected


@pytest.mark.parametrize(
    "name",
    [f"{command}-{model}" for command in ("table", "timeline") for model in TABLED],
)
def test_page_of_benchmarks_has_a_place_for_each(name: str) -> None:
    assert "\nfound\n" in report.replaced(report.holding(PAGES, name).read_text(), name, "found")
