"""One table: all sides, models, cases and numbers of clients, in rounds that can be interrupted and continued.

Each side is started once per round and model, and loaded cell after cell. Three rounds of ten sides take about two and
a half hours on two cores: a model that serves less than one text per second gets few and short requests, because the
third digit of a rate does not matter here.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from tests.bench import report
from tests.bench.options import sizes_of
from tests.bench.records import Key, Run, Store
from tests.bench.servers import sides
from tests.bench.servers.peers import PEERS, PeerStart
from tests.bench.servers.server import Spec
from tests.bench.servers.session import (
    Session,
    Turn,
    check_complete,
    checkpoint_of,
    context_line,
    machine,
    measure,
    plan_of,
    publish,
)
from tests.bench.servers.sides import spec_of
from vsched.bench.load.generator import LoadPlan

PURPOSE = "table"
WARMUP = 1


@dataclass(frozen=True, kw_only=True)
class Size:
    """The requests of a case; `sessions` by number of clients."""

    words: int
    tokens: int
    sessions: Mapping[int, int]


SIZES: Mapping[str, Mapping[str, Size]] = {
    "tiny25": {
        "text": Size(words=120, tokens=128, sessions={1: 8, 8: 32, 32: 64}),
        "image": Size(words=100, tokens=64, sessions={1: 8, 8: 24, 32: 64}),
    },
    "mid25": {
        "text": Size(words=60, tokens=32, sessions={1: 3, 8: 8, 32: 32}),
        "image": Size(words=50, tokens=32, sessions={1: 3, 8: 8, 32: 32}),
        "video": Size(words=50, tokens=32, sessions={1: 3, 8: 8, 32: 32}),
    },
    "smollm2": {"text": Size(words=120, tokens=64, sessions={1: 4, 8: 16, 32: 32})},
}


def settings_of(options: argparse.Namespace, model: str) -> str:
    """Describe everything that figures of a model depend on except their side, whose settings are in its version."""
    parts = [sizes_of(options).text]
    sizes = {case: size for case, size in SIZES[model].items() if case in options.cases}
    for case, size in sizes.items():
        counts = ",".join(map(str, size.sessions.values()))
        parts.append(f"{case}={size.words}words/{size.tokens}tokens/{counts}")
    return " ".join(parts)


def plan_for(model: str, case: str, clients: int, repeat: int, neighbours: int = 0) -> LoadPlan:
    """Return the load of a cell in a round; prompts differ between numbers of neighbours."""
    size = SIZES[model][case]
    seed = f"{repeat} beside {neighbours}" if neighbours else str(repeat)
    return plan_of(
        case,
        clients,
        words=size.words,
        tokens=size.tokens,
        sessions=size.sessions.get(clients, max(clients, min(size.sessions.values()))),
        seed=f"{PURPOSE}/{seed}",
        warmup=WARMUP,
    )


VLLM_VIDEOS = (
    *("--limit-mm-per-prompt", '{"image": 1, "video": 1}'),
    *("--media-io-kwargs", '{"video": {"num_frames": -1, "fps": 2}}'),
)
"""Arguments for the case `video`: two frames per second, as the checkpoint's video processor samples in vsched."""


def table(options: argparse.Namespace, console: Console) -> None:
    """Make the missing runs, and write all results.

    Raises:
        ConfigError: When a side could not be measured; all others have been by then.
    """
    store = Store(options.out)
    store.report.machine = machine()
    failed = [] if options.report_only else measure(turns(options, store, console), console)
    for model in options.models:
        write_table(options, store, model, console)
    check_complete(failed, options.out)


def turns(options: argparse.Namespace, store: Store, console: Console) -> list[Turn]:
    """Return all turns of the table in order: rounds, models, sides; every other round in reverse order of sides."""
    models: list[tuple[str, Session, list[Spec]]] = []
    for model in options.models:
        checkpoint = checkpoint_of(options.checkpoints / model, console)
        settings = settings_of(options, model)
        session = Session(options, store, console, checkpoint=model, settings=settings)
        models.append((model, session, specs_of(options, model, checkpoint)))
    return [
        Turn(session, spec, work_of(options, session, model, spec, repeat))
        for repeat in range(options.repeats)
        for model, session, specs in models
        for spec in specs[:: -1 if repeat % 2 else 1]
    ]


def work_of(
    options: argparse.Namespace, session: Session, model: str, spec: Spec, repeat: int
) -> dict[Key, LoadPlan]:
    """Return the loads of a side in a round."""
    # Runs without and with neighbours alternate, so that both see the same machine.
    cells = [
        (plan_for(model, case, clients, repeat, neighbours), neighbours)
        for case in SIZES[model]
        if case in options.cases
        for clients in options.concurrency
        for neighbours in options.neighbours[:: -1 if repeat % 2 else 1]
    ]
    return {
        session.key(plan, spec, purpose=PURPOSE, repeat=repeat, neighbours=neighbours): plan
        for plan, neighbours in cells
    }


def specs_of(options: argparse.Namespace, model: str, checkpoint: Path) -> list[Spec]:
    """Return the server specification of each side, in the order of the table."""
    return [
        peer_spec(options, side, checkpoint)
        if side in PEERS
        else our_spec(options.best, side, model, checkpoint)
        for side in options.sides
    ]


def peer_spec(options: argparse.Namespace, side: str, checkpoint: Path) -> Spec:
    """Return the specification of a peer running alone."""
    has_videos = side == "vllm" and "video" in getattr(options, "cases", ())
    start = PeerStart(
        checkpoint=checkpoint,
        sizes=sizes_of(options),
        folder=PEERS[side].folder(options.peers),
        arguments=VLLM_VIDEOS if has_videos else (),
    )
    return PEERS[side].spec(start)


def our_spec(best: Sequence[str], side: str, model: str, checkpoint: Path) -> Spec:
    """Return the specification of vsched, with defaults or the settings that the side's name stands for."""
    sets = [] if side == sides.VSCHED else best_of(best, model)
    weights = side.rpartition("-")[2]
    if weights in {"int8", "int4"}:
        sees = "vision_config" in json.loads((checkpoint / "config.json").read_text())
        stages = ("encode", "generate") if sees else ("generate",)
        sets += [f"{stage}.weights={weights}" for stage in stages]
    version = f"vsched {sides.described()}"
    version = f"{version} with {' '.join(sets)}" if sets else version
    return replace(spec_of(checkpoint, sets), side=side, version=version)


def best_of(best: Sequence[str], model: str) -> list[str]:
    """Return the settings given for a model, or for all: `mid25:placement=together`, `placement=together`."""
    found = []
    for text in best:
        head, colon, rest = text.partition(":")
        if colon and head in SIZES:
            found += [rest] if head == model else []
        else:
            found.append(text)
    return found


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
_TPOT = report.quantile("tpot_ms", "p50")
_TIMES = {
    "TTFT p50": report.quantile("ttft_ms", "p50"),
    "TTFT p99": report.quantile("ttft_ms", "p99"),
    "ITL p99": report.quantile("itl_ms", "p99"),
    "TPOT p50": _TPOT,
}
_TOTALS = ("failed", "wrong_length")
BySide = Mapping[str, Sequence[Run]]


class Place(NamedTuple):
    """A cell of the table, for all sides."""

    case: str
    clients: int
    neighbours: int

    @classmethod
    def of(cls, run: Run) -> Place:
        return cls(run.key.case, run.key.concurrency, run.key.neighbours)

    @property
    def text(self) -> str:
        loops = f", {self.neighbours} loop" if self.neighbours else ""
        return f"{self.case} x {self.clients}{loops}"


def write_table(options: argparse.Namespace, store: Store, model: str, console: Console) -> None:
    settings = settings_of(options, model)
    by_side = store.by_side(options.sides, PURPOSE, model, settings)
    runs = [run for found in by_side.values() for run in found]
    if not runs:
        return
    versions = {run.version for run in runs}
    started = [
        one
        for side in by_side
        for one in store.report.starts
        if (one.side, one.checkpoint, one.settings) == (side, model, settings)
        and one.version in versions
    ]
    parts = [
        report.starts(started),
        cells(by_side, model),
        LEGEND,
        missed(by_side, model),
        context_line(store.report.machine, settings, runs),
    ]
    name = f"table-{model}-video" if options.cases == ["video"] else f"table-{model}"
    publish(options, name, parts, {}, console)


def cells(by_side: BySide, model: str) -> str:
    """Return the table of all cells: per case and clients a line for each side."""
    lines = []
    for place in places(by_side, model):
        for side in by_side:
            runs = runs_at(by_side, side, place)
            if not runs:
                continue
            pairs = []
            for ours in (sides.VSCHED, OURS.get(PRECISIONS.get(side, ""), "")):
                mine = runs_at(by_side, ours, place) if ours != side else []
                pairs.append(report.ratios(mine, runs, report.requests_s))
            found = [kept_of(by_side, side, place), *pairs]
            kept, *shares = (_text(one) if one else "-" for one in found)
            reads = (*_TIMES.values(), report.prompt_tokens)
            totals = (sum(getattr(run.figures, name) for run in runs) for name in _TOTALS)
            lines.append(
                [
                    *(place.text, side, report.number(report.median(runs, report.requests_s))),
                    *(kept, *shares),
                    *(report.number(report.median(runs, read)) for read in reads),
                    *(str(count) for count in (*totals, len(runs))),
                ]
            )
    headings = (
        *("case x clients", "side", "requests/s"),
        "kept of quiet",
        *("defaults / it", "best of its precision / it"),
        *_TIMES,
        *("prompt tokens", "failed", "wrong length", "rounds"),
    )
    return report.markdown(*report.without_empty(headings, lines))


def missed(by_side: BySide, model: str) -> str:
    """Return a list of the cells that miss the target, at each precision."""
    lines = []
    for place in places(by_side, model):
        for precision, best in OURS.items():
            side = best if best in by_side or precision != "16 bits" else sides.VSCHED
            ours = runs_at(by_side, side, place)
            theirs = {
                peer: runs
                for peer, kind in PRECISIONS.items()
                if kind == precision and (runs := runs_at(by_side, peer, place))
            }
            if not ours or not theirs:
                continue
            where = f"- {place.text}, {precision}:"
            peer = max(theirs, key=lambda one: report.median(theirs[one], report.requests_s) or 0.0)
            found = report.ratios(ours, theirs[peer], report.requests_s)
            if found and statistics.median(found) < RATE_MIN:
                lines.append(f"{where} {_text(found)} times the requests/s of {peer}")
            peer = min(theirs, key=lambda one: report.median(theirs[one], _TPOT) or math.inf)
            found = report.ratios(ours, theirs[peer], _TPOT) if place.clients == 1 else []
            if found and statistics.median(found) > 1:
                lines.append(f"{where} TPOT {_text(found)} times that of {peer}")
        for side in (sides.VSCHED, *OURS.values()):
            kept = kept_of(by_side, side, place) if place.neighbours == 1 else []
            if kept and statistics.median(kept) < KEPT_MIN:
                lines.append(f"- {place.text}: {side} keeps {_text(kept)} of its quiet requests/s")
    if not lines:
        return "No cell misses the aim."
    aims = [f"below {RATE_MIN} times the best peer's requests/s", "above its TPOT at 1 client"]
    if any(place.neighbours for place in places(by_side, model)):
        aims.append(f"below {KEPT_MIN} of our own quiet requests/s next to 1 busy loop")
    return "\n".join([f"Cells {', or '.join(aims)}:", "", *lines])


def places(by_side: BySide, model: str) -> Iterator[Place]:
    """Yield each combination of case, clients and neighbours that has runs."""
    found = {Place.of(run) for runs in by_side.values() for run in runs}
    for case in SIZES[model]:
        yield from sorted(place for place in found if place.case == case)


def runs_at(by_side: BySide, side: str, place: Place) -> list[Run]:
    """Return the runs of a side in a cell, by round."""
    found = [run for run in by_side.get(side, []) if Place.of(run) == place]
    return sorted(found, key=lambda run: run.key.repeat)


def kept_of(by_side: BySide, side: str, place: Place) -> list[float]:
    """Return the shares of a side's quiet request rate that remain with neighbours, round by round."""
    if not place.neighbours:
        return []
    quiet = runs_at(by_side, side, place._replace(neighbours=0))
    return report.ratios(runs_at(by_side, side, place), quiet, report.requests_s)


def _text(found: Sequence[float]) -> str:
    return report.spread(found, alone=False)
