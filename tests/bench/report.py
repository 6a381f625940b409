"""Ratios of two sides, repeat by repeat, Markdown tables, and the generated parts of a page."""

from __future__ import annotations

import operator
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.bench.records import Run, Started
from vsched.bench.load.generator import Figures, Times
from vsched.errors import ConfigError

Read = Callable[[Figures], float | None]


def spread(ratios: Sequence[float], *, alone: bool = True) -> str:
    """Return the median of ratios, and their range; without `alone`, no range of a single one."""
    middle = f"{statistics.median(ratios):.2f}"
    if not alone and min(ratios) == max(ratios):
        return middle
    return f"{middle} ({min(ratios):.2f} to {max(ratios):.2f})"


def ratios(ours: Iterable[Run], theirs: Iterable[Run], read: Read) -> list[float]:
    """Return the ratios of a figure, repeat by repeat; repeats in which a side lacks it are left out."""
    others = {run.key.repeat: read(run.figures) for run in theirs}
    pairs = [(read(run.figures), others.get(run.key.repeat)) for run in ours]
    return [one / other for one, other in pairs if one is not None and other]


def median(runs: Iterable[Run], read: Read) -> float | None:
    """Return the median of a figure over the repeats; None if no run has it."""
    values = [value for run in runs if (value := read(run.figures)) is not None]
    return statistics.median(values) if values else None


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


requests_s: Read = operator.attrgetter("requests_s")
prompt_tokens: Read = operator.attrgetter("prompt_tokens_mean")


def memory(found: Sequence[Started]) -> str:
    """Return the resident memory of the median start, and of each of its processes."""
    parts = [list(one.memory_mib.values()) for one in found]
    middle = sorted(parts, key=sum)[len(parts) // 2]
    return f"{sum(middle):,.0f} ({' + '.join(f'{part:,.0f}' for part in middle)})"


def starts(started: Sequence[Started]) -> str:
    """Return the table of starts: medians over all starts of a side."""
    lines = []
    for side in dict.fromkeys(one.side for one in started):
        found = [one for one in started if one.side == side]
        figures = ((one.ready_s, one.answered_s, 100 * one.idle_cores) for one in found)
        medians = (number(statistics.median(values)) for values in zip(*figures, strict=True))
        versions = ", ".join(dict.fromkeys(one.version for one in found))
        lines.append([side, versions, *medians, memory(found), str(len(found))])
    times = ("ready after, s", "first answer after, s", "idle, % of a core")
    return markdown(("side", "version", *times, "resident, MiB", "starts"), lines)


def replaced(page: str, name: str, text: str) -> str:
    """Return the page with the text between the markers of a name replaced.

    Raises:
        ConfigError: When the page does not contain exactly one pair of them.
    """
    return replace_between(page, f"<!-- bench: {name} -->", f"<!-- end: {name} -->", text)


def replace_between(page: str, begin: str, end: str, text: str) -> str:
    """Return the page with the text between two markers replaced."""
    pattern = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
    if page.count(begin) != 1 or page.count(end) != 1 or not pattern.search(page):
        raise ConfigError(
            f"the page has no unique place for it. Remedy: write {begin} and {end} on separate lines, once"
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
    path.write_text(replaced(path.read_text(), name, text))
