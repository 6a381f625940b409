"""`vsched bench serve`: closed-loop load on any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vsched.bench.cases import Case, shape_of
from vsched.bench.client import BenchClient
from vsched.bench.serve import Load, default_sessions, run_load
from vsched.bench.summary import Figures, table, turns_table
from vsched.cli.bench import bench_app
from vsched.errors import ConfigError

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


@bench_app.command()
def serve(
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str, typer.Option(help="Model name; the server's first by default.")] = "",
    case: Annotated[
        list[Case] | None, typer.Option(help="Case to run; repeat for several, all by default.")
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Sessions at a time, by commas.")] = "1,8,32",
    sessions: Annotated[
        int | None,
        typer.Option(min=1, help="Sessions a case; by default 2 x concurrency, at least 8."),
    ] = None,
    words: Annotated[int | None, typer.Option(min=1, help="Words a message.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens an answer.")] = None,
    image_pixels: Annotated[int, typer.Option(min=16, help="Side of an image.")] = 448,
    turns: Annotated[int, typer.Option(min=1, help="Turns a conversation.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Draws other texts and images.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each measurement.")] = 2,
    extra: Annotated[
        bool,
        typer.Option(help="Fix the output's length with min_tokens and ignore_eos."),
    ] = True,
    api_key: Annotated[str, typer.Option(envvar="VSCHED_API_KEY", help="Bearer token.")] = "",
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Limit for one request.")] = 600.0,
    label: Annotated[str, typer.Option(help="A name for this run in the report.")] = "",
    json: Annotated[
        Path | None, typer.Option(help="Write the figures as JSON; - for standard output.")
    ] = None,
) -> None:
    """Load an OpenAI-compatible server in a closed loop and report req/s, tok/s, TTFT, ITL and TPOT."""
    levels = _levels(concurrency)
    client = BenchClient(url, api_key=api_key, timeout_s=timeout_s)

    def load(one_case: Case, level: int, name: str) -> Load:
        return Load(
            case=one_case,
            shape=shape_of(
                one_case,
                words=words,
                output_tokens=output_tokens,
                image_pixels=image_pixels,
                turns=turns,
            ),
            concurrency=level,
            sessions=sessions or default_sessions(one_case, level),
            model=name,
            seed=seed,
            warmup=warmup,
            fixed_length=extra,
        )

    async def run() -> tuple[str, list[Figures]]:
        name = model or await client.model()
        return name, await _run(
            client, [load(one_case, level, name) for one_case in case or Case for level in levels]
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        name, results = runner.run(run())
    created = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(label=label, url=url, model=name, created=created, results=results)
    _write(report, json)
    if any(figures.failed == figures.requests for figures in results):
        raise typer.Exit(1)


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        message = "concurrency: not a list of positive numbers. Remedy: give one such as 1,8,32."
        raise ConfigError(message)
    return levels


async def _run(client: BenchClient, loads: list[Load]) -> list[Figures]:
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
            results.append(await run_load(client, load, lambda task=task: progress.advance(task)))
    return results


def _write(report: Report, path: Path | None) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    to_stdout = path is not None and str(path) == "-"
    if to_stdout:
        sys.stdout.buffer.write(encoded)
    elif path is not None:
        path.write_bytes(encoded)
    stream = sys.stderr if to_stdout else sys.stdout
    console = Console(
        stderr=to_stdout, width=None if stream.isatty() else PIPE_COLUMNS, markup=False
    )
    console.print(table(report.results, " ".join(filter(None, (report.label, report.model)))))
    for figures in report.results:
        if figures.turns:
            console.print(turns_table(figures))
    for figures in report.results:
        where = f"{figures.case} x {figures.concurrency}"
        if figures.failed:
            console.print(f"{where}: {figures.failed} failed, the first: {figures.first_error}")
        if figures.client_cpu > _CLIENT_CPU_MAX:
            console.print(
                f"{where}: the client was busy {figures.client_cpu:.0%} of the time; "
                "it may be what was measured"
            )
