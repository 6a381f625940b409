"""`python -m tests.bench.parts recovery`: time from the kill of a generate rank to new tokens, by phase."""

from __future__ import annotations

import asyncio
import itertools
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


class RecoveryCase(msgspec.Struct, frozen=True):
    """Conditions of a kill: type of the model, and number of other processes that occupy a core each."""

    dtype: str
    busy: int

    @property
    def name(self) -> str:
        return f"{self.dtype}, {f'{self.busy} busy loops' if self.busy else 'quiet'}"


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One loss.

    Attributes:
        ends_s: Seconds from the kill to the end of each phase of `STATIONS`.
        complete: Whether no token was missing or duplicated.
        same_tokens: Whether all tokens were the same as without a loss.
    """

    case: RecoveryCase
    ends_s: list[float]
    complete: bool
    same_tokens: bool

    @property
    def kept(self) -> bool:
        """Whether the streams continued correctly; with rounded arithmetic, later tokens may differ."""
        return self.same_tokens or (self.complete and self.case.dtype != "float32")


class _Stream:
    """A seeded request with a picture, read while it runs."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.token_ids: list[int] = []
        self.received_s: list[float] = []
        self._engine = engine
        self._number = number
        self.ended = asyncio.create_task(self._read())

    async def _read(self) -> None:
        content = [{"type": "image"}, {"type": "text", "text": f"Question {self._number}"}]
        generation = await self._engine.generate(
            prompt=self._engine.preprocessor.render([{"role": "user", "content": content}]),
            images=[draw_image(self._number, 224)],
            sampling=SamplingParams(
                max_tokens=TOKENS_BEFORE + TOKENS_AFTER,
                temperature=1.0,
                seed=self._number,
                ignore_eos=True,
            ),
            request_id=f"stream-{self._number}-{time.monotonic_ns()}",
        )
        async for delta in generation:
            self.received_s += [time.monotonic()] * len(delta.token_ids)
            self.token_ids += delta.token_ids

    async def reach(self, tokens: int) -> None:
        """Wait for `tokens` tokens, or the end."""
        await _until(lambda: len(self.token_ids) >= tokens or self.ended.done())


class _Stations:
    """Times at which the lost group passed the phases of its restart, from its progress reports."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.spoke_s = self.sizing_s = 0.0

    def note(self, group: str, what: str, fraction: float) -> None:
        del fraction
        if group.startswith("generate") and what != STARTING:
            self.spoke_s = self.spoke_s or time.monotonic()
            if "KV cache" in what:
                self.sizing_s = self.sizing_s or time.monotonic()


async def measure_recovery(settings: Sequence[str], case: RecoveryCase) -> Recovery:
    """Kill a generate rank of a new server while it serves."""
    config = load_config(None, sets=[*settings, f"model.dtype={case.dtype}"], environ={}).config
    stations = _Stations()
    async with (
        asyncio.timeout(DEADLINE_S),
        Engine(config, on_progress=stations.note) as engine,
    ):
        undisturbed = [_Stream(engine, number) for number in range(STREAMS)]
        await asyncio.gather(*(stream.ended for stream in undisturbed))
        expected = [stream.token_ids for stream in undisturbed]
        with neighbours(case.busy):
            return await _kill(engine, stations, expected, case)


async def _kill(
    engine: Engine, stations: _Stations, expected: list[list[int]], case: RecoveryCase
) -> Recovery:
    streams = [_Stream(engine, number) for number in range(STREAMS)]
    await asyncio.gather(*(stream.reach(TOKENS_BEFORE) for stream in streams))
    stations.forget()
    group = next(one for one in engine.groups() if one["stage"] == "generate" and one["running"])
    killed_s = time.monotonic()
    os.kill(group["ranks"][0]["pid"], signal.SIGKILL)
    seen_s = await _until(lambda: engine.state != "ready")
    ready_s = await _until(lambda: engine.state == "ready")
    await asyncio.gather(*(stream.ended for stream in streams))
    firsts = [min((at for at in one.received_s if at > seen_s), default=0.0) for one in streams]
    ends = [seen_s, stations.spoke_s, stations.sizing_s, ready_s, max(firsts)]
    tokens = [stream.token_ids for stream in streams]
    return Recovery(
        case=case,
        ends_s=[max(end - killed_s, 0.0) for end in ends],
        complete=all(len(one) == TOKENS_BEFORE + TOKENS_AFTER for one in tokens),
        same_tokens=tokens == expected,
    )


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
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Case: dtype of the model.", show_default="float32, bfloat16"),
    ] = None,
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
    cores = usable_cores()
    settings = [*(assignments or ()), f"model.path={path}"]
    conditions = itertools.product(dtype or ["float32", "bfloat16"], busy or [0, 2 * cores])
    cases = [RecoveryCase(*one) for one in conditions]
    found = []
    for case in cases * rounds:
        with console.status(case.name):
            found.append(asyncio.run(measure_recovery(settings, case)))
    _show(found, cases, rounds, console)
    if out is not None:
        write_json(out, found)
    if not all(one.kept for one in found):
        console.print("A stream did not get the promised tokens.")
        raise typer.Exit(1)


def _show(found: list[Recovery], cases: list[RecoveryCase], rounds: int, console: Console) -> None:
    title = f"Seconds after a generate rank was killed, {STREAMS} streams, {rounds} losses each"
    table = Table("case, until", "lowest", "median", "highest", "same tokens", title=title)
    for case in cases:
        of_case = [one for one in found if one.case == case]
        same = sum(one.same_tokens for one in of_case)
        table.add_row(case.name, "", "", "", f"{same} of {len(of_case)}")
        ends = zip(*(one.ends_s for one in of_case), strict=True)
        for station, values in zip(STATIONS, ends, strict=True):
            figures = (min(values), statistics.median(values), max(values))
            table.add_row(f"  {station}", *(f"{value:.2f}" for value in figures))
        table.add_section()
    console.print(table)
