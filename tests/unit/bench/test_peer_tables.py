"""Results of the bench harness: figures, ratios, tables, and parts of a page."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.bench.options import PAGES, TABLED, options_of, settings_of
from tests.bench.records import Key, Run
from tests.bench.report import page, tables
from tests.bench.report.pairs import pair_cells
from tests.bench.report.ratios import rows
from tests.bench.sessions import context_line
from vsched.bench.load.generator import Figures, Times
from vsched.errors import ConfigError


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
    budget: int = 0,
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
        budget=budget,
    )
    figures = figures_of(rate, failed=failed, ttft=ttft)
    return Run(key=key, figures=figures, version="v1", taken="t", load=0)


# --- ratios ---


def test_ratio_is_of_each_pair() -> None:
    """A noisy minute that halves both runs of a pair leaves its ratio."""
    ours = [run_of("vsched", rate, repeat=index) for index, rate in enumerate((30, 15, 44))]
    theirs = [run_of("vllm", rate, repeat=index) for index, rate in enumerate((20, 10, 22))]
    (row,) = rows(ours, theirs, ["text"])
    ratio = row.ratio(tables.requests_s)
    assert ratio is not None
    assert (ratio.median, ratio.least, ratio.greatest) == (1.5, 1.5, 2.0)
    assert row.medians(tables.requests_s) == (30, 20)
    assert ratio.text == "1.50 (1.50 to 2.00)"


def test_rows_leave_out_runs_without_their_pair() -> None:
    ours = [run_of("vsched", 1, repeat=index) for index in range(3)]
    theirs = [run_of("vllm", 1, repeat=1), run_of("vllm", 1, repeat=1, concurrency=32)]
    (row,) = rows(ours, theirs, ["text"])
    assert [run.key.repeat for run in row.ours] == [1]


def test_ratio_of_what_is_not_there_is_none() -> None:
    (row,) = rows([run_of("vsched", 1)], [run_of("vllm", 0.0)], ["text"])
    assert row.ratio(tables.requests_s) is None
    assert row.ratio(tables.quantile("ttft_ms", "p50")) is None


# --- tables ---


def cells(table: str, line: int) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[line].strip("|").split("|")]


# --- the page ---

PAGE = "# Title\n\n<!-- bench: one -->\nold\n<!-- end: one -->\n\nrest\n"


def test_page_replaces_what_lies_between_its_markers(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    page.write(path, "one", r"new \1 text")
    expected = PAGE.replace("old\n", "\nnew \\1 text\n\n")
    assert path.read_text() == expected
    page.write(path, "one", r"new \1 text")
    assert path.read_text() == expected


@pytest.mark.parametrize(
    "name",
    [f"{command}-{model}" for command in ("table", "timeline") for model in TABLED],
)
def test_page_of_benchmarks_has_a_place_for_each(name: str) -> None:
    assert "\nfound\n" in page.replaced(page.holding(PAGES, name).read_text(), name, "found")


@pytest.mark.parametrize("text", ["", PAGE + PAGE, "<!-- end: one -->\n<!-- bench: one -->\n"])
def test_page_refuses_to_guess_a_place(text: str) -> None:
    with pytest.raises(ConfigError, match="bench: one"):
        page.replaced(text, "one", "new")


def test_load_of_waiting_servers_is_reported_if_measured() -> None:
    """A peer that works while vsched is measured takes its cores; it is left out of the others' figures."""
    old = run_of("vsched", 1)
    figures = msgspec.structs.replace(old.figures, waiting=0.4)
    reported = "whose turn it was not at most 0.40"
    for runs, expected in (
        ([old], False),
        ([old, msgspec.structs.replace(old, figures=figures)], True),
    ):
        line = " ".join(context_line("2 cores", "x=1", runs).split())
        assert (reported in line) == expected


def test_pair_cells_are_medians_and_the_ratios_of_each_round() -> None:
    pairs = [(1.0, 2.0), (2.0, 2.0), (4.0, 2.0)]
    assert pair_cells(pairs, digits=1) == "2.0 | 2.0 | 1.00 (0.50 to 2.00)"


def test_settings_that_were_given_come_after_those_of_the_command() -> None:
    options = options_of("x", tokens=9, rounds=2).parse_args(["demo", "--set", "model.name=own"])
    assert (options.tokens, options.rounds) == (9, 2)
    assert settings_of(options) == ["model.path=demo", "model.name=bench", "model.name=own"]
