"""Rounds of the curve: vsched with each step time limit, and every peer, each started once per round."""

from __future__ import annotations

import argparse
import dataclasses

from rich.console import Console

from tests.bench.compare import checkpoint_of, plan_of, session_of
from tests.bench.curve import report
from tests.bench.table.measure import Turn, best_of, measure, our_spec, peer_spec
from tests.bench.table.sizes import SIZES, WARMUP
from vsched.bench.load.generator import LoadPlan
from vsched.errors import ConfigError

PURPOSE = "curve"


def curve(options: argparse.Namespace, console: Console) -> None:
    """Make the missing runs, and write all results.

    Raises:
        ConfigError: When a side could not be measured; all others have been by then.
    """
    session = session_of(options, console)
    store = session.store
    checkpoint = checkpoint_of(options, console)
    best = best_of(options.best, options.checkpoint)
    specs = [our_spec(point, checkpoint, [*best, *sets_of(point)]) for point in options.points]
    specs += [peer_spec(options, side, checkpoint) for side in options.sides]
    turns = [
        Turn(
            session=session,
            spec=spec,
            work={
                (session.key(plan, spec, purpose=PURPOSE, repeat=repeat),): plan for plan in plans
            },
        )
        for repeat in range(options.repeats)
        for plans in [plans_of(options, repeat)]
        for spec in specs[:: -1 if repeat % 2 else 1]
    ]
    failed = [] if options.report_only else measure(turns, store, console)
    keys = {key for turn in turns for (key,) in turn.work}
    report.write(options, session, [run for run in store.report.runs if run.key in keys], console)
    if failed:
        raise ConfigError(
            f"not all was measured: {'; '.join(failed)}. Remedy: see the logs in {options.out / 'logs'}; "
            "the same command makes the missing runs"
        )


def sets_of(point: str) -> list[str]:
    """Return the settings of a point, `TARGET_MS/RATIO`."""
    target, _, ratio = point.partition("/")
    return [f"generate.step_target_ms={target}", f"generate.step_target_ratio={ratio}"]


def plans_of(options: argparse.Namespace, repeat: int) -> list[LoadPlan]:
    """Return the loads of a side in a round: those of table cells, with more sessions."""
    found = []
    for case in options.cases:
        size = SIZES[options.checkpoint][case]
        load = argparse.Namespace(
            words=size.words,
            output_tokens=size.tokens,
            turns=1,
            sessions=options.sessions or 3 * options.clients,
        )
        plan = plan_of(load, case, options.clients, seed=str(repeat), purpose=PURPOSE)
        found.append(dataclasses.replace(plan, warmup=WARMUP))
    return found
