"""The page of the table: how each side starts, each cell, and where the aim is missed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from rich.console import Console

from tests.bench.compare import context_line, publish
from tests.bench.records import Run, Store
from tests.bench.report import tables
from tests.bench.report.ratios import Row, rows
from tests.bench.servers import sides
from tests.bench.table.sizes import PURPOSE, SIZES, settings_of

RATE_MIN = 1.1
"""Times the requests of the best peer of the same precision that are wanted."""
OURS = {"16 bits": "vsched-best", "8 bits": "vsched-int8", "4 bits": "vsched-int4"}
PRECISIONS = {
    "vllm": "16 bits",
    "llamacpp": "16 bits",
    "openvino": "16 bits",
    "llamacpp-q8_0": "8 bits",
    "openvino-int8": "8 bits",
    "llamacpp-q4_0": "4 bits",
}
"""What a weight of each peer takes, about: whom of ours it is compared with."""
_TPOT = tables.quantile("tpot_ms", "p50")
_TIMES = tables.columns(
    ("ttft_ms", "p50"),
    ("ttft_ms", "p99"),
    ("itl_ms", "p50"),
    ("itl_ms", "p99"),
    ("tpot_ms", "p50"),
)


def write(options: argparse.Namespace, store: Store, model: str, console: Console) -> None:
    """Write what there is of a model."""
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
        "Times in ms. Ratios are of requests/s, round by round: median, least and greatest.",
        missed(by_side, model),
        context_line(store.report.machine, settings, runs),
    ]
    publish(options, f"table-{model}", parts, {}, console)


def cells(by_side: dict[str, list[Run]], model: str) -> str:
    """Return the table of all cells: per case and clients a line for each side."""
    lines = []
    for case, clients in places(by_side, model):
        for side in by_side:
            row = row_of(by_side, side, side, case, clients)
            if row is None:
                continue
            ratios = []
            for ours in (sides.VSCHED, OURS.get(PRECISIONS.get(side, ""), "")):
                pair = (
                    row_of(by_side, ours, side, case, clients) if ours not in {side, ""} else None
                )
                ratio = pair.ratio(tables.requests_s) if pair else None
                ratios.append(ratio.text if ratio else "-")
            lines.append(
                [
                    f"{case} x {clients}",
                    side,
                    tables.number(row.medians(tables.requests_s)[0]),
                    *ratios,
                    *(tables.number(row.medians(read)[0]) for _, read in _TIMES),
                    str(row.failed[0]),
                    str(row.wrong_length[0]),
                    str(len(row.ours)),
                ]
            )
    headings = (
        *("case x clients", "side", "requests/s", "defaults / it", "best of its precision / it"),
        *(name for name, _ in _TIMES),
        *("failed", "wrong length", "rounds"),
    )
    return tables.markdown(headings, lines)


def missed(by_side: dict[str, list[Run]], model: str) -> str:
    """Return, as a list, the cells in which the aim is missed at each precision."""
    lines = []
    for case, clients in places(by_side, model):
        for precision, ours in OURS.items():
            pairs = [
                (peer, row)
                for peer, kind in PRECISIONS.items()
                if kind == precision and (row := row_of(by_side, ours, peer, case, clients))
            ]
            if not pairs:
                continue
            where = f"- {case} x {clients}, {precision}:"
            peer, row = max(pairs, key=lambda pair: pair[1].medians(tables.requests_s)[1] or 0.0)
            ratio = row.ratio(tables.requests_s)
            if ratio and ratio.median < RATE_MIN:
                lines.append(f"{where} {ratio.text} times the requests/s of {peer}")
            peer, row = min(pairs, key=lambda pair: pair[1].medians(_TPOT)[1] or float("inf"))
            ratio = row.ratio(_TPOT) if clients == 1 else None
            if ratio and ratio.median > 1:
                lines.append(f"{where} TPOT {ratio.text} times that of {peer}")
    if not lines:
        return "No cell misses the aim."
    return "\n".join(
        [
            f"Below {RATE_MIN} times the best peer's requests/s, or above its TPOT at 1 client:",
            "",
            *lines,
        ]
    )


def places(by_side: dict[str, list[Run]], model: str) -> Iterator[tuple[str, int]]:
    """Yield each case and number of clients that there are runs of."""
    found = {(run.key.case, run.key.concurrency) for runs in by_side.values() for run in runs}
    for case in SIZES[model]:
        for clients in sorted(clients for name, clients in found if name == case):
            yield case, clients


def row_of(
    by_side: dict[str, list[Run]], ours: str, theirs: str, case: str, clients: int
) -> Row | None:
    """Return the rounds that both sides have of a cell."""

    def at(side: str) -> Sequence[Run]:
        return [
            run
            for run in by_side.get(side, [])
            if (run.key.case, run.key.concurrency) == (case, clients)
        ]

    return next(iter(rows(at(ours), at(theirs), [case])), None)
