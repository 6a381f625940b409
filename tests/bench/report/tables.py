"""Figures as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from tests.bench.records import Started
from tests.bench.report.ratios import Read, Row
from vsched.bench.load.generator import Figures, Times


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table; the first two columns are names."""
    rule = ["---" if index < 2 else "--:" for index in range(len(headings))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *lines))


def without_empty(
    headings: Sequence[str], lines: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Drop the columns that are 0 or missing in every line."""
    kept = [place for place in range(len(headings)) if {line[place] for line in lines} - {"-", "0"}]
    return [headings[place] for place in kept], [[line[place] for place in kept] for line in lines]


def number(value: float | None) -> str:
    """Return a number with its significant digits."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def quantile(times: str, name: str) -> Read:
    """Return a reader of a quantile of a duration in figures."""

    def read(figures: Figures) -> float | None:
        found: Times | None = getattr(figures, times)
        return None if found is None else float(getattr(found, name))

    return read


def columns(*times: tuple[str, str]) -> Sequence[tuple[str, Read]]:
    """Return headings and readers of some quantiles of durations."""
    return [(f"{time[:4].strip('_').upper()} {name}", quantile(time, name)) for time, name in times]


def requests_s(figures: Figures) -> float:
    """Return the request rate."""
    return figures.requests_s


def output_tokens_s(figures: Figures) -> float:
    """Return the token rate."""
    return figures.output_tokens_s


def _both(row: Row, read: Read) -> str:
    """Return both medians, followed by the ratio."""
    ratio = row.ratio(read)
    medians = " / ".join(number(value) for value in row.medians(read))
    return medians if ratio is None else f"{medians} ({ratio.median:.2f})"


def rates(rows: Sequence[Row], sides: tuple[str, str]) -> str:
    """Return the table of rates: each median, and the ratio of the pairs with its spread."""
    ours, theirs = sides
    lines = []
    for row in rows:
        mine, other = row.medians(requests_s)
        ratio = row.ratio(requests_s)
        cells = [
            row.case,
            str(row.length or row.concurrency),
            number(mine),
            number(other),
            "-" if ratio is None else ratio.text,
            " / ".join(number(value) for value in row.medians(output_tokens_s)),
            " / ".join(map(str, row.failed)),
            " / ".join(map(str, row.wrong_length)),
            str(len(row.ours)),
        ]
        lines.append(cells)
    headings = (
        "case",
        "prompt tokens" if any(row.length for row in rows) else "clients",
        f"{ours}, requests/s",
        f"{theirs}, requests/s",
        "ratio: median (min to max)",
        "tokens/s",
        "failed",
        "wrong length",
        "repeats",
    )
    return markdown(headings, lines)


LATENCIES: tuple[tuple[str, Read], ...] = (
    ("TTFT p50", quantile("ttft_ms", "p50")),
    ("TTFT p95", quantile("ttft_ms", "p95")),
    ("TTFT p99", quantile("ttft_ms", "p99")),
    ("ITL p50", quantile("itl_ms", "p50")),
    ("ITL p99", quantile("itl_ms", "p99")),
    ("worst gap", quantile("itl_ms", "worst")),
    ("TPOT p50", quantile("tpot_ms", "p50")),
    ("TPOT p99", quantile("tpot_ms", "p99")),
)


def latencies(rows: Sequence[Row]) -> str:
    """Return the table of latencies in ms: vsched / other side, and the median ratio of the pairs."""
    lines = [
        [row.case, str(row.concurrency), *(_both(row, read) for _, read in LATENCIES)]
        for row in rows
    ]
    return markdown(("case", "clients", *(name for name, _ in LATENCIES)), lines)


def memory(found: Sequence[Started]) -> str:
    """Return the resident memory of the median start, and of each of its processes."""
    parts = [list(one.memory_mib.values()) for one in found]
    middle = sorted(parts, key=sum)[len(parts) // 2]
    return f"{sum(middle):,.0f} ({' + '.join(f'{part:,.0f}' for part in middle)})"


def starts(started: Sequence[Started]) -> str:
    """Return the table of starts: medians over all starts of a side."""

    def median(side: str, read: Callable[[Started], float]) -> str:
        return number(statistics.median(read(one) for one in started if one.side == side))

    lines = []
    for side in dict.fromkeys(one.side for one in started):
        found = [one for one in started if one.side == side]
        cells = [
            side,
            ", ".join(dict.fromkeys(one.version for one in found)),
            median(side, lambda one: one.ready_s),
            median(side, lambda one: one.answered_s),
            median(side, lambda one: one.idle_cores * 100),
            memory(found),
            str(len(found)),
            "yes" if any(one.paused for one in found) else "no",
        ]
        lines.append(cells)
    headings = (
        "side",
        "version",
        "ready after, s",
        "first answer after, s",
        "idle, % of a core",
        "resident, MiB",
        "starts",
        "stopped between turns",
    )
    return markdown(headings, lines)
