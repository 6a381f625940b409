"""`vsched bench serve`: closed-loop load on any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from vsched.bench.load.shapes import Case, shape_of
from vsched.errors import ConfigError
from vsched.terminal.options import check_writable


def serve(
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str, typer.Option(help="Model name; the server's first by default.")] = "",
    case: Annotated[
        list[Case] | None,
        typer.Option(help="Case to run; repeat for several. By default all but video."),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Concurrent sessions, separated by commas.")
    ] = "1,8,32",
    sessions: Annotated[
        int | None,
        typer.Option(min=1, help="Sessions per case; by default 2 x concurrency, at least 8."),
    ] = None,
    words: Annotated[int | None, typer.Option(min=1, help="Words per message.")] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Output tokens per request.")
    ] = None,
    image_pixels: Annotated[int, typer.Option(min=16, help="Side of an image.")] = 448,
    turns: Annotated[int, typer.Option(min=1, help="Turns per conversation.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of texts and images.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each measurement.")] = 2,
    extra: Annotated[
        bool,
        typer.Option(help="Fix the output's length with min_tokens and ignore_eos."),
    ] = True,
    api_key: Annotated[str, typer.Option(envvar="VSCHED_API_KEY", help="Bearer token.")] = "",
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Limit for one request.")] = 600.0,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures as JSON; - for standard output.")
    ] = None,
) -> None:
    """Load an OpenAI-compatible server in a closed loop and report req/s, tok/s, TTFT, ITL and TPOT."""
    import uvloop

    from vsched.bench.load.client import BenchClient
    from vsched.bench.load.generator import LoadPlan, measure, sessions_for, write_report

    check_writable({"--json": None if str(json) == "-" else json})
    levels = _levels(concurrency)
    sizes = {"words": words, "output_tokens": output_tokens}

    plans = [
        LoadPlan(
            case=one,
            shape=shape_of(one, image_pixels=image_pixels, turns=turns, **sizes),
            concurrency=level,
            sessions=sessions_for(one, level, sessions),
            seed=str(seed),
            warmup=warmup,
        )
        for one in case or [one for one in Case if one is not Case.VIDEO]
        for level in levels
    ]
    client = BenchClient(url, api_key=api_key, timeout_s=timeout_s)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        work = measure(client, plans, url=url, model=model, fixed_length=extra)
        report = runner.run(work)
    write_report(report, json)
    if any(figures.failed == figures.requests for figures in report.results):
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
