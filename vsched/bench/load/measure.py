"""Runs the loads of one command, with progress bars and reports."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vsched.bench.load.client import BenchClient, chat_body
from vsched.bench.load.figures import Figures, table, turns_table
from vsched.bench.load.generator import Body, LoadPlan, draw, run

PIPE_COLUMNS = 160
"""Width of the tables if standard output is no terminal."""
_CLIENT_CPU_MAX = 0.7


class LoadReport(msgspec.Struct, kw_only=True):
    """Format of the `--json` report."""

    label: str
    url: str
    model: str
    created: str
    results: list[Figures]


def fixed_length_fields(tokens: int) -> dict[str, Any]:
    """Return request fields for exactly `tokens` output tokens, for servers with vLLM's `min_tokens`."""
    return {"min_tokens": tokens, "ignore_eos": True}


async def measure(
    client: BenchClient,
    plans: Sequence[LoadPlan],
    *,
    url: str,
    model: str,
    label: str,
    fixed_length: bool,
) -> LoadReport:
    """Run the plans against a model, by default the server's first.

    Raises:
        BenchError: When the server does not list its model.
    """
    name = model or await client.model()

    def body(messages: list[dict[str, Any]], tokens: int) -> bytes:
        return chat_body(
            name, messages, tokens, fixed_length_fields(tokens) if fixed_length else {}
        )

    results = await run_plans(client, plans, body)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return LoadReport(label=label, url=url, model=name, created=created, results=results)


async def run_plans(client: BenchClient, plans: Sequence[LoadPlan], body: Body) -> list[Figures]:
    """Run plans one after another with a progress bar."""
    results: list[Figures] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for plan in plans:
            task = progress.add_task(f"{plan.case} x {plan.concurrency}", total=plan.requests)
            finished = functools.partial(progress.advance, task)
            results.append(await run(client, draw(plan), body, finished=finished))
    return results


def write_report(report: LoadReport, path: Path | None) -> None:
    """Print the tables and write the figures to `path`.

    With the path `-`, the figures go to standard output and the tables to standard error.
    """
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
            console.print(f"{where}: {figures.failed} failed, most often: {figures.errors[0]}")
        if figures.client_cpu > _CLIENT_CPU_MAX:
            busy = f"the client was busy {figures.client_cpu:.0%} of the time"
            console.print(f"{where}: {busy}; it may have limited the result")
