"""Report of the table: the start of each side, all cells, and the cells that miss the target."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console

from tests.bench.records import Run, Store
from tests.bench.report import tables
from tests.bench.report.ratios import Ratio, Row, rows
from tests.bench.servers import sides
from tests.bench.sessions import context_line, publish
from tests.bench.table.sizes import PURPOSE, SIZES, settings_of
from vsched.bench.load.generator import Figures

RATE_MIN = 1.1
"""Target request rate, as a multiple of the best peer's with the same precision."""
KEPT_MIN = 0.5
"""Target request rate with one neighbour, as a share of our rate on a quiet machine."""
OURS = {"16 bits": "vsched-best", "8 bits": "vsched-int8", "4 bits": "vsched-int4"}
PRECISIONS = {
    "vllm": "16 bits",
    "llamacpp": "16 bits",
    "openvino": "16 bits",
    "llamacpp-q8_0": "8 bits",
    "openvino-int8": "8 bits",
    "llamacpp-q4_0": "4 bits",
}
"""Approximate weight precision of each peer, which selects our side for the comparison."""
LEGEND = """\
Times in ms. Ratios are of requests/s, round by round: median, least and greatest. Columns without a figure, and counts
of failed requests and wrong lengths that are 0, are left out."""
_TPOT = tables.quantile("tpot_ms", "p50")
_TIMES = tables.columns(
    ("ttft_ms", "p50"),
    ("ttft_ms", "p99"),
    ("itl_ms", "p99"),
    ("tpot_ms", "p50"),
)


class Place(NamedTuple):
    """A cell of the table, for all sides."""

    case: str
    clients: int
    neighbours: int

    @classmethod
    def of(cls, run: Run) -> Place:
        """Return the cell of a run."""
        return cls(run.key.case, run.key.concurrency, run.key.neighbours)

    @property
    def text(self) -> str:
        """The cell in words."""
        loops = f", {self.neighbours} loop" if self.neighbours else ""
        return f"{self.case} x {self.clients}{loops}"


def write(options: argparse.Namespace, store: Store, model: str, console: Console) -> None:
    """Write all results of a model."""
    settings = settings_of(options, model)
    mine = (PURPOSE, model, settings)
    runs = [
        run
        for run in store.report.runs
        if (run.key.purpose, run.key.checkpoint, run.key.settings) == mine
    ]
    if not runs:
        return
    by_side = {
        side: found
        for side in options.sides
        if (found := [run for run in runs if run.key.side == side])
    }
    versions = {run.version for run in runs}
    started = [
        one
        for side in by_side
        for one in store.report.starts
        if (one.side, one.checkpoint, one.settings) == (side, *mine[1:]) and one.version in versions
    ]
    parts = [
        tables.starts(started),
        cells(by_side, model),
        LEGEND,
        missed(by_side, model),
        context_line(store.report.machine, settings, runs),
    ]
    name = f"table-{model}-video" if options.cases == ["video"] else f"table-{model}"
    publish(options, name, parts, {}, console)


def cells(by_side: dict[str, list[Run]], model: str) -> str:
    """Return the table of all cells: per case and clients a line for each side."""
    lines = []
    found = list(places(by_side, model))
    for place in found:
        for side in by_side:
            row = row_of(by_side, side, side, place)
            if row is None:
                continue
            ratios = []
            for ours in (sides.VSCHED, OURS.get(PRECISIONS.get(side, ""), "")):
                pair = row_of(by_side, ours, side, place) if ours not in {side, ""} else None
                ratio = pair.ratio(tables.requests_s) if pair else None
                ratios.append(ratio.text if ratio else "-")
            kept = kept_of(by_side, side, place)
            lines.append(
                [
                    place.text,
                    side,
                    tables.number(row.medians(tables.requests_s)[0]),
                    kept.text if kept else "-",
                    *ratios,
                    *(tables.number(row.medians(read)[0]) for _, read in _TIMES),
                    tables.number(row.medians(_prompt_tokens)[0]),
                    str(row.failed[0]),
                    str(row.wrong_length[0]),
                    str(len(row.ours)),
                ]
            )
    headings = (
        *("case x clients", "side", "requests/s"),
        "kept of quiet",
        *("defaults / it", "best of its precision / it"),
        *(name for name, _ in _TIMES),
        *("prompt tokens", "failed", "wrong length", "rounds"),
    )
    return tables.markdown(*tables.without_empty(headings, lines))


def missed(by_side: dict[str, list[Run]], model: str) -> str:
    """Return a list of the cells that miss the target, at each precision."""
    lines = []
    for place in places(by_side, model):
        for precision, best in OURS.items():
            ours = best if best in by_side or precision != "16 bits" else sides.VSCHED
            pairs = [
                (peer, row)
                for peer, kind in PRECISIONS.items()
                if kind == precision and (row := row_of(by_side, ours, peer, place))
            ]
            if not pairs:
                continue
            where = f"- {place.text}, {precision}:"
            peer, row = max(pairs, key=lambda pair: pair[1].medians(tables.requests_s)[1] or 0.0)
            ratio = row.ratio(tables.requests_s)
            if ratio and ratio.median < RATE_MIN:
                lines.append(f"{where} {ratio.text} times the requests/s of {peer}")
            peer, row = min(pairs, key=lambda pair: pair[1].medians(_TPOT)[1] or float("inf"))
            ratio = row.ratio(_TPOT) if place.clients == 1 else None
            if ratio and ratio.median > 1:
                lines.append(f"{where} TPOT {ratio.text} times that of {peer}")
        for side in (sides.VSCHED, *OURS.values()):
            kept = kept_of(by_side, side, place) if place.neighbours == 1 else None
            if kept and kept.median < KEPT_MIN:
                lines.append(f"- {place.text}: {side} keeps {kept.text} of its quiet requests/s")
    if not lines:
        return "No cell misses the aim."
    aims = [f"below {RATE_MIN} times the best peer's requests/s", "above its TPOT at 1 client"]
    if any(place.neighbours for place in places(by_side, model)):
        aims.append(f"below {KEPT_MIN} of our own quiet requests/s next to 1 busy loop")
    return "\n".join([f"Cells {', or '.join(aims)}:", "", *lines])


def places(by_side: dict[str, list[Run]], model: str) -> Iterator[Place]:
    """Yield each combination of case, clients and neighbours that has runs."""
    found = {Place.of(run) for runs in by_side.values() for run in runs}
    for case in SIZES[model]:
        yield from sorted(place for place in found if place.case == case)


def row_of(by_side: dict[str, list[Run]], ours: str, theirs: str, place: Place) -> Row | None:
    """Return the common rounds of both sides in a cell."""
    return _paired(_at(by_side, ours, place), _at(by_side, theirs, place), place)


def kept_of(by_side: dict[str, list[Run]], side: str, place: Place) -> Ratio | None:
    """Return the share of a side's quiet request rate that remains with neighbours, round by round."""
    if not place.neighbours:
        return None
    quiet = place._replace(neighbours=0)
    row = _paired(_at(by_side, side, place), _at(by_side, side, quiet), place)
    return row.ratio(tables.requests_s) if row else None


def _prompt_tokens(figures: Figures) -> float:
    return figures.prompt_tokens_mean


def _at(by_side: dict[str, list[Run]], side: str, place: Place) -> Sequence[Run]:
    return [run for run in by_side.get(side, []) if Place.of(run) == place]


def _paired(ours: Sequence[Run], theirs: Sequence[Run], place: Place) -> Row | None:
    return next(iter(rows(ours, theirs, [place.case])), None)
