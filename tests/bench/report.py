"""Ratios of two sides, run by run, Markdown tables, and the generated parts of a page."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.records import Run, Started
from vsched.bench.load.generator import Figures, Times
from vsched.errors import ConfigError

Read = Callable[[Figures], float | None]


def spread(ratios: Sequence[float]) -> str:
    """Return the median of ratios, and their range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratios of the repeats: median, minimum and maximum."""

    median: float
    least: float
    greatest: float

    @property
    def text(self) -> str:
        """The ratio, with its spread if there are several."""
        if self.least == self.greatest:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.least:.2f} to {self.greatest:.2f})"


@dataclass(frozen=True, kw_only=True)
class Row:
    """All repeats of a case at one concurrency: paired runs of vsched and of the other side."""

    case: str
    concurrency: int
    ours: list[Run]
    theirs: list[Run]

    def medians(self, read: Read) -> tuple[float | None, float | None]:
        """Return the medians of a figure over the repeats, for vsched and for the other side."""
        return _median(self.ours, read), _median(self.theirs, read)

    def ratio(self, read: Read) -> Ratio | None:
        """Return the ratio of vsched to the other side, pair by pair; None if no pair has the figure on both sides."""
        ratios = []
        for one, other in zip(self.ours, self.theirs, strict=True):
            ours, theirs = read(one.figures), read(other.figures)
            if ours is not None and theirs:
                ratios.append(ours / theirs)
        if not ratios:
            return None
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))

    @property
    def failed(self) -> tuple[int, int]:
        """Failed requests over all repeats."""
        return _total(self.ours, "failed"), _total(self.theirs, "failed")

    @property
    def wrong_length(self) -> tuple[int, int]:
        """Outputs of another length than requested, over all repeats."""
        return _total(self.ours, "wrong_length"), _total(self.theirs, "wrong_length")


def _median(runs: Iterable[Run], read: Read) -> float | None:
    values = [value for run in runs if (value := read(run.figures)) is not None]
    return statistics.median(values) if values else None


def _total(runs: Iterable[Run], name: str) -> int:
    return sum(getattr(run.figures, name) for run in runs)


def rows(ours: Iterable[Run], theirs: Iterable[Run], cases: Sequence[str]) -> list[Row]:
    """Pair the runs of two sides by case, concurrency and repeat; unpaired runs are left out."""
    others = {(run.key.case, run.key.concurrency, run.key.repeat): run for run in theirs}
    pairs: dict[tuple[str, int], list[tuple[Run, Run]]] = {}
    for run in sorted(ours, key=lambda run: run.key.repeat):
        key = run.key
        if other := others.get((key.case, key.concurrency, key.repeat)):
            pairs.setdefault((key.case, key.concurrency), []).append((run, other))
    return [
        Row(
            case=case,
            concurrency=concurrency,
            ours=[one for one, _ in pairs[case, concurrency]],
            theirs=[other for _, other in pairs[case, concurrency]],
        )
        for case, concurrency in sorted(pairs, key=lambda cell: (cases.index(cell[0]), cell[1]))
    ]


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
    )
    return markdown(headings, lines)


def replaced(page: str, name: str, text: str) -> str:
    """Return the page with the text between the markers of a name replaced.

    Raises:
        ConfigError: When the page does not contain exactly one pair of them.
    """
    begin, end = f"<!-- bench: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
    if page.count(begin) != 1 or page.count(end) != 1 or not pattern.search(page):
        raise ConfigError(
            f"the page lacks a unique part {name}. Remedy: write {begin} and {end} on separate lines, once"
        )
    return pattern.sub(lambda _: f"\n{text.strip()}\n\n", page)


def holding(folder: Path, name: str) -> Path:
    """Return the page of a folder that contains the markers of a name.

    Raises:
        ConfigError: When there is none, or several.
    """
    begin = f"<!-- bench: {name} -->"
    found = [path for path in sorted(folder.glob("*.md")) if begin in path.read_text()]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} pages of {folder} have a place for {name}. Remedy: write {begin} into one of them"
        )
    return found[0]


def write(path: Path, name: str, text: str) -> None:
    """Replace a part of a page on disk."""
    path.write_text(replaced(path.read_text(), name, text))
