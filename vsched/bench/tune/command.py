"""`vsched tune`: find the best split of this machine's cores among ranks by measurement."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from vsched.bench.load.shapes import Case
from vsched.checkpoints import local_checkpoint
from vsched.terminal.options import (
    CheckpointArgument,
    ConfigOption,
    JsonOption,
    SetOption,
    load,
    write_json,
)
from vsched.worker.spec import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from vsched.bench.tune.measure import Placement, PlacementTrial, Tuning
    from vsched.config import Config
    from vsched.engine import Progress

CASES = (Case.TEXT, Case.IMAGE)


def tune(
    path: CheckpointArgument,
    config: ConfigOption = None,
    assignments: SetOption = None,
    *,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each load, if time permits.")] = 3,
    limit: Annotated[
        float, typer.Option(min=10, help="Total seconds; a lower limit shortens the runs.")
    ] = 300.0,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the best split as TOML, for --config."),
    ] = None,
    out: JsonOption = None,
) -> None:
    """Serve text and images with several splits of the cores, and report which one is fastest here.

    The required time is reported after a few requests; splits that fall behind are given up.
    """
    import uvloop
    from rich.console import Console

    from vsched.api.http_server import forgo_models
    from vsched.bench.tune import measure as bench
    from vsched.terminal.progress import loading_progress

    console = Console()
    path = local_checkpoint(path)
    base = [*(assignments or ()), f"model.path={path}", "server.port=0"]
    plain = load(config, base).config
    together = plain.encode.tensor_parallel == plain.generate.tensor_parallel
    ways = bench.placements(usable_cores(), together=together)
    # The likely winners come first, because there may not be enough time for all.
    ways.sort(key=lambda way: (way.replicas, way.placement != "together"))
    orders = bench.orders_of(CASES, clients)
    configs = [load(config, [*base, *way.assignments()]).config for way in ways]
    forgo_models(configs[0])
    tuning = bench.Tuning(orders, ways=len(ways), repeats=repeats, limit_s=limit)
    left: list[Placement] = []
    for number, (way, settings) in enumerate(zip(ways, configs, strict=True), start=1):
        if not tuning.has_time():
            left.append(way)
            continue
        console.print(f"{number} of {len(ways)}: {' '.join(way.assignments())}")
        with (
            loading_progress(console) as report,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(_try(tuning, way, settings, report, console.print))
    trials = tuning.trials
    best = bench.choose(trials)
    _show(trials, best, console)
    for way in left:
        console.print(
            f"Not tried, for time was up (--limit {limit:g}): {' '.join(way.assignments())}"
        )
    sets = " ".join(f"--set {one}" for one in best.placement.assignments())
    console.print(f"vsched serve {path} {sets}", soft_wrap=True)
    if write is not None:
        write.write_text(best.placement.toml(), encoding="utf-8")
        console.print(f"Written: {write}; use it with --config {write}")
    if out is not None:
        write_json(out, trials)
        console.print(f"JSON: {out}")


async def _try(
    tuning: Tuning,
    way: Placement,
    config: Config,
    report: Progress,
    say: Callable[[str], None],
) -> None:
    """Serve the loads with one split; the first one shows how long everything will take."""
    from vsched.bench.tune.measure import served

    began_s = time.monotonic()
    async with served(config, on_progress=report) as run:
        if tuning.plan is None:
            report("serving", "a few requests", 0.0)
            plan = await tuning.probe(run, start_s=time.monotonic() - began_s)
            loads = ", ".join(f"{count} of {case}" for case, count in plan.requests.items())
            say(f"All takes about {plan.seconds:.0f} s: runs of {loads}, {plan.repeats} of each.")
        assert tuning.plan is not None
        total = tuning.plan.repeats * len(tuning.plan.requests)

        def on_run(done: int) -> None:
            report("serving", f"{done} of {total} runs", done / total)

        trial = await tuning.measure(way, run, on_run=on_run)
    if trial.ended:
        say(trial.ended)


def _show(trials: Sequence[PlacementTrial], best: PlacementTrial, console: Console) -> None:
    from rich.table import Table

    from vsched.bench.tune.measure import shares

    table = Table(caption="requests per second: median (minimum to maximum)")
    for name in (
        "replicas",
        "threads each",
        "encode threads",
        "placement",
        *CASES,
        "of the best",
        "",
    ):
        table.add_column(name, justify="right")
    for one, share in zip(trials, shares(trials), strict=True):
        way = one.placement
        rates = (_rates(one.runs[case]) for case in CASES)
        table.add_row(
            *(str(way.replicas), str(way.threads), str(way.encode_threads)),
            way.placement,
            *rates,
            f"{share:.0%}",
            "chosen" if one is best else one.ended,
        )
    console.print(table)


def _rates(runs: Sequence[float]) -> str:
    """Return the median of some rates, with minimum and maximum."""
    if not runs:
        return ""
    digits = 1 if min(runs) >= 10 else 2
    middle, least, most = (f"{rate:.{digits}f}" for rate in (median(runs), min(runs), max(runs)))
    return middle if len(runs) == 1 else f"{middle} ({least} to {most})"
