"""Ratios of two sides, run by run, and the best setting of a sweep; without any server."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.bench.records import Key, Run
from vsched.bench.load.generator import Figures

Read = Callable[[Figures], float | None]


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
    length: int
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


def _place(key: Key) -> tuple[str, int, int, int]:
    return key.case, key.length, key.concurrency, key.repeat


def rows(ours: Iterable[Run], theirs: Iterable[Run], cases: Sequence[str]) -> list[Row]:
    """Pair the runs of two sides by case, length, concurrency and repeat; unpaired runs are left out."""
    others = {_place(run.key): run for run in theirs}
    pairs: dict[tuple[str, int, int], list[tuple[Run, Run]]] = {}
    for run in sorted(ours, key=lambda run: run.key.repeat):
        place = _place(run.key)
        if place in others:
            pairs.setdefault(place[:3], []).append((run, others[place]))
    order = {case: index for index, case in enumerate(cases)}
    return [
        Row(
            case=case,
            length=length,
            concurrency=concurrency,
            ours=[one for one, _ in pairs[case, length, concurrency]],
            theirs=[other for _, other in pairs[case, length, concurrency]],
        )
        for case, length, concurrency in sorted(
            pairs, key=lambda place: (order.get(place[0], len(order)), *place[1:])
        )
    ]
