"""`vsched simulate --swarm N`: whole engines with random faults, until one breaks what must always hold."""

from __future__ import annotations

import time
from pathlib import Path

import typer


def run_swarm(count: int, *, seed: int, faults: Path | None, probes: bool = False) -> None:
    """Run `count` scenarios; report the results, and the command that repeats a failed one; `probes` one by one.

    Raises:
        ConfigError: When the plan cannot be read.
        typer.Exit: With status 1, when a scenario failed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from vsched.probes import PROBES
    from vsched.sim.cluster.swarm import swarm

    columns = (TextColumn("swarm"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started_s = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("swarm", total=count)
        outcome = swarm(
            count, seed=seed, faults=faults, on_report=lambda _seed, _report: bars.advance(task)
        )
    took_s = time.perf_counter() - started_s
    console = Console()
    for failure in outcome.failures:
        console.print(failure.describe(), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{outcome.scenarios} scenarios in {took_s:.1f} s, {outcome.virtual_s:.0f} s of virtual time: "
        f"{outcome.requests} requests, {outcome.events} events, {outcome.struck} faults, "
        f"{outcome.losses} groups lost, {len(outcome.failures)} scenarios failed",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    reached = len(outcome.probes) - len(outcome.unreached)
    console.print(f"{reached} of {len(outcome.probes)} probes reached", highlight=False)
    if probes:
        for name, scenarios in outcome.probes.items():
            line = f"| `{name}` | {PROBES[name]} | {scenarios} |"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if outcome.failures:
        raise typer.Exit(1)
