"""`vsched tune`: how to share this machine's cores among the ranks, by measurement."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vsched.bench.load.shapes import Case
from vsched.terminal.options import ConfigOption, JsonOption, SetOption, load, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from vsched.bench.tune.measure import PlacementTrial

CASES = (Case.TEXT, Case.IMAGE)


def tune(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint; model.path.")],
    config: ConfigOption = None,
    assignments: SetOption = None,
    *,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each load.")] = 3,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the best as TOML, for --config.", show_default=False),
    ] = None,
    out: JsonOption = None,
) -> None:
    """Serve text and images with several ways of sharing the cores, and say which serves most here."""
    import uvloop
    from rich.console import Console

    from vsched.api.server import forgo_models
    from vsched.bench.tune import measure as bench
    from vsched.terminal.progress import loading_progress

    console = Console()
    base = [*(assignments or ()), f"model.path={path}", "server.port=0"]
    plain = load(config, base).config
    together = plain.encode.tensor_parallel == plain.generate.tensor_parallel
    ways = bench.placements(len(os.sched_getaffinity(0)), together=together)
    orders = bench.orders_of(CASES, clients)
    configs = [load(config, [*base, *way.assignments()]).config for way in ways]
    forgo_models(configs[0])
    total = repeats * len(orders)
    trials: list[PlacementTrial] = []
    for way, settings in zip(ways, configs, strict=True):
        console.print(f"{len(trials) + 1} of {len(ways)}: {' '.join(way.assignments())}")
        with (
            loading_progress(console) as report,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            running = bench.measure_placement(
                way,
                settings,
                orders,
                repeats=repeats,
                on_progress=report,
                on_run=lambda done: report("serving", f"{done} of {total} runs", done / total),
            )
            trials.append(runner.run(running))
    best = bench.choose(trials)
    _show(trials, best, console)
    if write is not None:
        write.write_text(best.placement.toml(), encoding="utf-8")
        console.print(f"Written: {write}; use it with --config {write}")
    if out is not None:
        write_json(out, trials)
        console.print(f"JSON: {out}")


def _show(trials: Sequence[PlacementTrial], best: PlacementTrial, console: Console) -> None:
    from rich.table import Table

    from vsched.bench.tune.measure import shares

    table = Table(caption="requests a second: median (least to most)")
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
        rates = (
            f"{one.requests_s[case]:.1f} ({min(one.runs[case]):.1f} to {max(one.runs[case]):.1f})"
            for case in CASES
        )
        table.add_row(
            *(str(way.replicas), str(way.threads), str(way.encode_threads)),
            way.placement,
            *rates,
            f"{share:.0%}",
            "chosen" if one is best else "",
        )
    console.print(table)
