"""Run the loads of one command, show how far they are, and write what they gave."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vsched.bench.load.client import BenchClient
from vsched.bench.load.closed_loop import Load, run_load
from vsched.bench.report.summary import Figures, table, turns_table

PIPE_COLUMNS = 160
"""Width of the tables where there is no terminal to ask."""
_CLIENT_CPU_MAX = 0.7


class Report(msgspec.Struct, kw_only=True):
    """What `--json` writes."""

    label: str
    url: str
    model: str
    created: str
    results: list[Figures]


async def measure(
    client: BenchClient, plan: Callable[[str], Sequence[Load]], *, url: str, model: str, label: str
) -> Report:
    """Run the loads that `plan` makes for a model, the server's first where none is named.

    Raises:
        BenchError: When the server cannot be asked for its model.
    """
    name = model or await client.model()
    results = await run_loads(client, plan(name))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Report(label=label, url=url, model=name, created=created, results=results)


async def run_loads(client: BenchClient, loads: Sequence[Load]) -> list[Figures]:
    """Run loads one after the other under a progress bar."""
    results: list[Figures] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for load in loads:
            total = load.sessions * load.shape.turns
            task = progress.add_task(f"{load.case} x {load.concurrency}", total=total)
            finished = functools.partial(progress.advance, task)
            results.append(await run_load(client, load, finished))
    return results


def write_report(report: Report, path: Path | None) -> None:
    """Print the tables and write the figures to `path`; `-` is standard output, and tables then go to the other."""
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    to_stdout = path is not None and str(path) == "-"
    if to_stdout:
        sys.stdout.buffer.write(encoded)
    elif path is not None:
        path.write_bytes(encoded)
    stream = sys.stderr if to_stdout else sys.stdout
    width = None if stream.isatty() else PIPE_COLUMNS
    console = Console(stderr=to_stdout, width=width, markup=False)
    console.print(table(report.results, " ".join(filter(None, (report.label, report.model)))))
    for figures in report.results:
        if figures.turns:
            console.print(turns_table(figures))
    for figures in report.results:
        where = f"{figures.case} x {figures.concurrency}"
        if figures.failed:
            console.print(f"{where}: {figures.failed} failed, the first: {figures.first_error}")
        if figures.client_cpu > _CLIENT_CPU_MAX:
            busy = f"the client was busy {figures.client_cpu:.0%} of the time"
            console.print(f"{where}: {busy}; it may be what was measured")
