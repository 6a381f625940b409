"""`python -m tests.bench.parts kernel`: cost of the scheduler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from vsched.terminal.options import ConfigOption, SetOption, load, write_json


def kernel(
    config: ConfigOption = None,
    assignments: SetOption = None,
    steps: Annotated[int, typer.Option(help="Events per repeat.")] = 200,
    repeats: Annotated[int, typer.Option(help="Repeats per case.")] = 5,
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write.", show_default=False)
    ] = None,
) -> None:
    """Measure the microseconds of a decode step, a one-image request and an arrival, with the configured policies."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from tests.bench.parts.kernel.measure import (
        RUNNING,
        measure_arrival,
        measure_decode,
        measure_request,
    )

    policies = load(config, assignments).policies.for_kernel()
    console = Console()
    rows = [
        measure_decode(policies, running, steps=steps, repeats=repeats)
        for running in track(RUNNING, "decode steps", console=console, transient=True)
    ]
    rows += [
        measure(policies, requests=steps, repeats=repeats)
        for measure in (measure_request, measure_arrival)
    ]
    table = Table(title=f"The kernel alone, µs an event ({repeats} x {steps} events)")
    for name in ("case", "running", "p50", "p99", "mean", "spread of medians"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        numbers = (row.p50_us, row.p99_us, row.mean_us, row.spread_us)
        running = str(row.running) if row.running else "-"
        table.add_row(row.case, running, *(f"{number:.1f}" for number in numbers))
    console.print(table)
    if out is not None:
        write_json(out, {"load": os.getloadavg()[0], "rows": rows})
