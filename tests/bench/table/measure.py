"""Rounds of the table: each side is started once per round and model, and loaded cell after cell."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from tests.bench.options import sizes_of
from tests.bench.records import Key, Store
from tests.bench.servers import sides
from tests.bench.servers.peers import PEERS, PeerStart
from tests.bench.servers.server import ServerError, Spec
from tests.bench.servers.session import Session
from tests.bench.servers.start import spec_of
from tests.bench.sessions import checkpoint_of, machine
from tests.bench.table import report
from tests.bench.table.sizes import PURPOSE, SIZES, plan_for, rest_s, settings_of
from vsched.bench.load.generator import LoadPlan, fixed_length_fields
from vsched.errors import ConfigError

Work = dict[tuple[Key, ...], LoadPlan]
VLLM_VIDEOS = (
    *("--limit-mm-per-prompt", '{"image": 1, "video": 1}'),
    *("--media-io-kwargs", '{"video": {"num_frames": -1, "fps": 2}}'),
)
"""Arguments for the case `video`: two frames per second, as the checkpoint's video processor samples in vsched."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One side in one round, with the session of its model and its loads."""

    session: Session
    spec: Spec
    work: Work


def table(options: argparse.Namespace, console: Console) -> None:
    """Make the missing runs, and write all results.

    Raises:
        ConfigError: When a side could not be measured; all others have been by then.
    """
    store = Store(options.out)
    store.report.machine = machine()
    failed = [] if options.report_only else measure(turns(options, store, console), store, console)
    for model in options.models:
        report.write(options, store, model, console)
    if failed:
        raise ConfigError(
            f"not all was measured: {'; '.join(failed)}. Remedy: see the logs in {options.out / 'logs'}; "
            "the same command makes the missing runs, and --sides omits a side"
        )


def turns(options: argparse.Namespace, store: Store, console: Console) -> list[Turn]:
    """Return all turns of the table in order: rounds, models, sides; every other round in reverse order of sides."""
    models: list[tuple[str, Session, list[Spec]]] = []
    for model in options.models:
        options.checkpoint = model
        checkpoint = checkpoint_of(options, console)
        session = Session(
            store,
            console,
            checkpoint=model,
            settings=settings_of(options, model),
            ready_s=options.ready_s,
            idle_s=options.idle_s,
            timeout_s=options.timeout_s,
        )
        models.append((model, session, specs_of(options, model, checkpoint)))
    return [
        Turn(session=session, spec=spec, work=work_of(options, session, model, spec, repeat))
        for repeat in range(options.repeats)
        for model, session, specs in models
        for spec in specs[:: -1 if repeat % 2 else 1]
    ]


def work_of(
    options: argparse.Namespace, session: Session, model: str, spec: Spec, repeat: int
) -> Work:
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
        (session.key(plan, spec, purpose=PURPOSE, repeat=repeat, neighbours=neighbours),): plan
        for plan, neighbours in cells
    }


def measure(found: Sequence[Turn], store: Store, console: Console) -> list[str]:
    """Make the missing runs; return the sides that could not be measured, with reasons."""
    left = [
        dataclasses.replace(one, work=one.session.missing(one.work, [one.spec])) for one in found
    ]
    total = sum(len(one.work) for one in found)
    failed: dict[str, None] = {}
    while left:
        turn, *left = left
        if not turn.work:
            continue
        rest = [[key for (key,) in one.work] for one in (turn, *left)]
        seconds = rest_s(rest, store.report.runs, store.report.starts)
        console.print(
            f"{total - sum(map(len, rest))} of {total} cells; the rest takes about "
            f"{timedelta(seconds=round(seconds))}; now {turn.spec.side} with {turn.session.checkpoint}",
            markup=False,
        )
        try:
            with turn.session.servers([turn.spec]) as servers:
                turn.session.take_turns(servers, turn.work)
        except (ServerError, ConfigError) as error:
            console.print(f"left out: {error}", markup=False)
            failed[f"{turn.spec.side} with {turn.session.checkpoint}"] = None
    return list(failed)


def specs_of(options: argparse.Namespace, model: str, checkpoint: Path) -> list[Spec]:
    """Return the server specification of each side, in the order of the table."""
    return [_spec(options, side, model, checkpoint) for side in options.sides]


def _spec(options: argparse.Namespace, side: str, model: str, checkpoint: Path) -> Spec:
    if side in PEERS:
        return peer_spec(options, side, checkpoint)
    sets = [] if side == sides.VSCHED else best_of(options.best, model)
    weights = side.rpartition("-")[2]
    if weights in {"int8", "int4"}:
        sees = "vision_config" in json.loads((checkpoint / "config.json").read_text())
        stages = ("encode", "generate") if sees else ("generate",)
        sets += [f"{stage}.weights={weights}" for stage in stages]
    return our_spec(side, checkpoint, sets)


def peer_spec(options: argparse.Namespace, side: str, checkpoint: Path) -> Spec:
    """Return the specification of a peer running alone."""
    peer = PEERS[side]
    has_videos = side == "vllm" and "video" in getattr(options, "cases", ())
    start = PeerStart(
        checkpoint=checkpoint,
        sizes=sizes_of(options),
        folder=peer.folder(options.peers),
        budget=options.budget,
        arguments=VLLM_VIDEOS if has_videos else (),
    )
    # No other server runs at the same time, so its idle threads disturb none.
    return dataclasses.replace(peer.spec(start), pausable=False)


def our_spec(side: str, checkpoint: Path, sets: Sequence[str]) -> Spec:
    """Return the specification of vsched with some settings and defaults otherwise."""
    version = f"vsched {sides.described(sides.ROOT)}"
    return dataclasses.replace(
        spec_of(checkpoint, sets),
        side=side,
        version=f"{version} with {' '.join(sets)}" if sets else version,
        exactly=fixed_length_fields,
    )


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
