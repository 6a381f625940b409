"""`python -m tests.bench.parts recovery`: time from the kill of a generate rank to new tokens, by phase.

In float32; with `--set model.dtype=bfloat16`, later tokens may differ from those without a loss.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tests.bench.servers.processes import neighbours
from vsched.aio.worker_groups import STARTING
from vsched.bench.load.generator import draw_image
from vsched.config import load_config
from vsched.engine import Engine
from vsched.terminal.options import JsonOption, SetOption, write_json
from vsched.types import SamplingParams
from vsched.worker.spec import usable_cores

STREAMS = 4
TOKENS_BEFORE = 8
TOKENS_AFTER = 24
DEADLINE_S = 300.0
POLL_S = 0.001
STATIONS = (
    "loss noticed",
    "process, imports",
    "weights",
    "rank ready",
    "last stream's first new token",
)
"""Phases after the kill, in order; the KV cache exists when the rank is ready."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One loss.

    Attributes:
        busy: Number of other processes that occupy a core each.
        ends_s: Seconds from the kill to the end of each phase of `STATIONS`.
        same_tokens: Whether all tokens were the same as without a loss.
    """

    busy: int
    ends_s: list[float]
    same_tokens: bool


class _Stream:
    """A seeded request with a picture, read while it runs."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.token_ids: list[int] = []
        self.received_s: list[float] = []
        self.ended = asyncio.create_task(self._read(engine, number))

    async def _read(self, engine: Engine, number: int) -> None:
        content = [{"type": "image"}, {"type": "text", "text": f"Question {number}"}]
        generation = await engine.generate(
            prompt=engine.preprocessor.render([{"role": "user", "content": content}]),
            images=[draw_image(number, 224)],
            sampling=SamplingParams(
                max_tokens=TOKENS_BEFORE + TOKENS_AFTER,
                temperature=1.0,
                seed=number,
                ignore_eos=True,
            ),
            request_id=f"stream-{number}-{time.monotonic_ns()}",
        )
        async for delta in generation:
            self.received_s += [time.monotonic()] * len(delta.token_ids)
            self.token_ids += delta.token_ids


class _Stations(dict[str, float]):
    """Times at which the lost group passed the phases of its restart, from its progress reports."""

    def note(self, group: str, what: str, fraction: float) -> None:
        del fraction
        if group.startswith("generate") and what != STARTING:
            self.setdefault("imported", time.monotonic())
            if "KV cache" in what:
                self.setdefault("loaded", time.monotonic())


async def measure_recovery(settings: Sequence[str], busy: int) -> Recovery:
    """Kill a generate rank of a new server while it serves."""
    stations = _Stations()
    async with (
        asyncio.timeout(DEADLINE_S),
        Engine(
            load_config(None, sets=settings, environ={}).config, on_progress=stations.note
        ) as engine,
    ):
        undisturbed = [_Stream(engine, number) for number in range(STREAMS)]
        await asyncio.gather(*(stream.ended for stream in undisturbed))
        with neighbours(busy):
            streams = [_Stream(engine, number) for number in range(STREAMS)]
            ends_s = await _kill(engine, stations, streams)
    same = [one.token_ids for one in streams] == [one.token_ids for one in undisturbed]
    return Recovery(busy=busy, ends_s=ends_s, same_tokens=same)


async def _kill(engine: Engine, stations: _Stations, streams: Sequence[_Stream]) -> list[float]:
    """Kill the rank once all streams have some tokens; return the seconds to the end of each phase."""
    await _until(
        lambda: all(len(one.token_ids) >= TOKENS_BEFORE or one.ended.done() for one in streams)
    )
    stations.clear()
    group = next(one for one in engine.groups() if one["stage"] == "generate" and one["running"])
    killed_s = time.monotonic()
    os.kill(group["ranks"][0]["pid"], signal.SIGKILL)
    seen_s = await _until(lambda: engine.state != "ready")
    ready_s = await _until(lambda: engine.state == "ready")
    await asyncio.gather(*(stream.ended for stream in streams))
    firsts = [min((at for at in one.received_s if at > seen_s), default=0.0) for one in streams]
    restarted = (stations.get(name, 0.0) for name in ("imported", "loaded"))
    return [max(end - killed_s, 0.0) for end in (seen_s, *restarted, ready_s, max(firsts))]


async def _until(condition: Callable[[], bool]) -> float:
    """Wait for a condition and return the time; the round's deadline limits the wait."""
    while not condition():  # noqa: ASYNC110 - no event to await; a millisecond is accurate enough
        await asyncio.sleep(POLL_S)
    return time.monotonic()


def recovery(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Losses of each case; the cases take turns.")
    ] = 3,
    busy: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Case: other processes that occupy a core each.",
            show_default="0, twice the cores",
        ),
    ] = None,
    out: JsonOption = None,
) -> None:
    """Kill a generate rank under load; measure the time to the first new token of every stream, by phase."""
    console = Console()
    settings = ["model.dtype=float32", *(assignments or ()), f"model.path={path}"]
    cases = busy or [0, 2 * usable_cores()]
    found = []
    for case in cases * rounds:
        with console.status(f"{case} busy loops"):
            found.append(asyncio.run(measure_recovery(settings, case)))
    title = f"Seconds after a generate rank was killed, {STREAMS} streams, {rounds} losses each"
    table = Table("busy loops, until", "lowest", "median", "highest", "same tokens", title=title)
    for case in cases:
        of_case = [one for one in found if one.busy == case]
        same = sum(one.same_tokens for one in of_case)
        table.add_row(str(case), "", "", "", f"{same} of {len(of_case)}")
        ends = zip(*(one.ends_s for one in of_case), strict=True)
        for station, values in zip(STATIONS, ends, strict=True):
            figures = (min(values), statistics.median(values), max(values))
            table.add_row(f"  {station}", *(f"{value:.2f}" for value in figures))
        table.add_section()
    console.print(table)
    if out is not None:
        write_json(out, found)
    if not all(one.same_tokens for one in found):
        console.print("A stream did not get the promised tokens.")
        raise typer.Exit(1)
