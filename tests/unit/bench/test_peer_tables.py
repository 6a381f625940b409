"""Results of the bench harness: figures, ratios, tables, and parts of a page."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.bench.options import MADE, PAGES, SMOLLM2, options_of, settings_of
from tests.bench.records import Key, Run, Started
from tests.bench.report import page, tables
from tests.bench.report.pairs import pair_cells
from tests.bench.report.ratios import rows
from tests.bench.sessions import context_line
from vsched.bench.load.client import Sample
from vsched.bench.load.figures import NOT_ASKED, Answers, Figures, Times, gaps, summarise, times
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


# --- figures ---


def stream(*stamps: float, tokens: int = 3) -> Sample:
    return Sample(0.0, stamps[-1], list(stamps), ["a"] * len(stamps), output_tokens=tokens)


def test_times_are_quantiles_and_the_worst_in_ms() -> None:
    found = times([0.001 * value for value in range(1, 101)])
    assert found is not None
    assert (found.p50, found.p95, found.p99, found.worst) == (50.5, 95.05, 99.01, 100.0)
    assert times([]) is None


def test_figures_count_failures_and_keep_their_words() -> None:
    failures = [Sample(0.0, error=text) for text in ("status 500", NOT_ASKED, NOT_ASKED)]
    samples = [stream(0.1, 0.2, 0.4), *failures]
    answers = Answers(sessions=[[one] for one in samples], tokens=[3] * 4, wall_s=2.0, cpu_s=0.5)
    figures = summarise("text", 1, answers)
    assert (figures.requests, figures.failed, figures.requests_s) == (4, 3, 0.5)
    assert figures.errors == [f"2 x {NOT_ASKED}", "1 x status 500"]
    assert figures.wrong_length == 0
    assert figures.client_cpu == 0.25


def test_figures_count_answers_of_another_length() -> None:
    samples = [stream(0.1, tokens=3), stream(0.1, tokens=2)]
    answers = Answers(sessions=[samples], tokens=[3, 3], wall_s=1.0)
    assert summarise("text", 1, answers).wrong_length == 1


def test_figures_of_a_burst_tell_decoders_from_images() -> None:
    decoder = stream(0.1, 0.2, 1.2, 1.3, tokens=4)
    image = stream(0.9, 1.0, tokens=2)
    answers = Answers(
        sessions=[[decoder], [image]],
        tokens=[4, 2],
        decoders=range(1),
        burst=(0.5, 1.1),
        wall_s=2.0,
    )
    figures = summarise("mixed", 1, answers)
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.worst == 900, "the image's alone"
    assert figures.itl_ms is not None
    assert (figures.itl_ms.p50, figures.itl_ms.worst) == (1000, 1000), "the gap of the burst alone"
    assert figures.tpot_ms is not None
    assert figures.tpot_ms.p50 == 400


def test_gaps_touch_the_window() -> None:
    sample = stream(0.0, 1.0, 2.0, 4.0)
    assert gaps([sample], None) == [1, 1, 2]
    assert gaps([sample], (1.5, 1.6)) == [1]
    assert gaps([sample], (1.5, 2.5)) == [1, 2]
    assert gaps([sample], (5.0, 6.0)) == []


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


def test_rows_follow_the_cases_and_the_concurrency() -> None:
    both = [
        [run_of(side, 1, case=case, concurrency=count) for case in "ab" for count in (32, 1)]
        for side in ("vsched", "vllm")
    ]
    found = rows(both[0], both[1], ["b", "a"])
    assert [(row.case, row.concurrency) for row in found] == [
        ("b", 1),
        ("b", 32),
        ("a", 1),
        ("a", 32),
    ]


def test_ratio_of_what_is_not_there_is_none() -> None:
    (row,) = rows([run_of("vsched", 1)], [run_of("vllm", 0.0)], ["text"])
    assert row.ratio(tables.requests_s) is None
    assert row.ratio(tables.quantile("ttft_ms", "p50")) is None


# --- tables ---


def cells(table: str, line: int) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[line].strip("|").split("|")]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.123, "0.12"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_numbers_have_the_digits_that_count(value: float | None, text: str) -> None:
    assert tables.number(value) == text


def test_rates_show_both_sides_the_ratio_and_every_failure() -> None:
    found = rows([run_of("vsched", 3.0)], [run_of("vllm", 2.0, failed=2)], ["text"])
    table = tables.rates(found, ("vsched", "vllm"))
    expected = [
        "text",
        "8",
        "3.00",
        "2.00",
        "1.50 (1.50 to 1.50)",
        "30.0 / 20.0",
        "0 / 2",
        "0 / 0",
        "1",
    ]
    assert cells(table, 2) == expected
    assert len({line.count("|") for line in table.splitlines()}) == 1


def test_latencies_show_ratios_of_ours_to_theirs() -> None:
    found = rows([run_of("vsched", 1, ttft=50.0)], [run_of("vllm", 1, ttft=100.0)], ["text"])
    assert cells(tables.latencies(found), 2)[2:6] == ["50.0 / 100 (0.50)"] * 3 + ["- / -"]


def test_starts_show_medians_and_who_is_stopped() -> None:
    def started(side: str, ready_s: float, *, paused: bool) -> Started:
        return Started(
            side=side,
            checkpoint="tiny25",
            settings="",
            budget=0,
            version=f"{side} 1",
            command=[],
            environment={},
            ready_s=ready_s,
            answered_s=ready_s + 1,
            idle_cores=0.01,
            memory_mib={"a 1": 100.0, "b 2": 20.0},
            paused=paused,
            taken="t",
        )

    found = [started("vsched", value, paused=False) for value in (5.0, 7.0, 6.0)]
    table = tables.starts([*found, started("vllm", 50.0, paused=True)])
    assert cells(table, 2) == [
        "vsched",
        "vsched 1",
        "6.00",
        "7.00",
        "1.00",
        "120 (100 + 20)",
        "3",
        "no",
    ]
    assert cells(table, 3)[-1] == "yes"


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
    [
        "scheduler",
        *(f"{peer}-{SMOLLM2}" for peer in ("vllm", "llamacpp")),
        *(f"{peer}-{checkpoint}" for peer in ("vllm", "transformers") for checkpoint in MADE),
        *(f"growth-vllm-{checkpoint}" for checkpoint in MADE),
    ],
)
def test_page_of_benchmarks_has_a_place_for_each(name: str) -> None:
    assert "\nfound\n" in page.replaced(page.holding(PAGES, name).read_text(), name, "found")


def test_page_of_a_name_is_the_one_that_holds_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 pages .* have a place for one"):
        page.holding(tmp_path, "one")
    for file in ("a.md", "b.md"):
        (tmp_path / file).write_text(PAGE)
    with pytest.raises(ConfigError, match="2 pages .* have a place for one"):
        page.holding(tmp_path, "one")


@pytest.mark.parametrize("text", ["", PAGE + PAGE, "<!-- end: one -->\n<!-- bench: one -->\n"])
def test_page_refuses_to_guess_a_place(text: str) -> None:
    with pytest.raises(ConfigError, match="bench: one"):
        page.replaced(text, "one", "new")


def test_what_a_server_does_when_it_is_not_its_turn_is_told_where_it_was_looked_at() -> None:
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
