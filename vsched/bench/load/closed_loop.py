"""Closed-loop load on an OpenAI-compatible server: so many sessions at a time, each waiting for its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vsched.bench.load.cases import draw_session
from vsched.bench.load.client import BenchClient, Sample
from vsched.bench.load.shapes import Case, Shape
from vsched.bench.report.summary import Figures, summarise
from vsched.errors import ConfigError, limit_message

_SESSIONS_MIN = 8
_SEED_STRIDE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run: a case at a concurrency.

    `fixed_length` adds `min_tokens` and `ignore_eos`, for servers that know them, so that every answer is equally long.
    """

    case: Case
    shape: Shape
    concurrency: int
    sessions: int
    model: str
    seed: int = 0
    warmup: int = 2
    fixed_length: bool = True

    def body(self, messages: Sequence[dict[str, Any]]) -> bytes:
        """Return the body of one request."""
        content: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.shape.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.fixed_length:
            content |= {"min_tokens": self.shape.output_tokens, "ignore_eos": True}
        return msgspec.json.encode(content)

    def draw(self, index: int) -> list[dict[str, Any]]:
        """Return the messages of session `index`; negative ones are for warming up."""
        base = (self.seed * 1009 + self.concurrency) * _SEED_STRIDE
        return draw_session(self.case, self.shape, base + index)


def sessions_for(case: Case, concurrency: int, wanted: int | None) -> int:
    """Return how many sessions a run has: as many as are wanted, or what measures a case without taking all day.

    Raises:
        ConfigError: When so many clients would never be at work at once.
    """
    if wanted is None:
        return concurrency if case is Case.CONVERSATION else max(2 * concurrency, _SESSIONS_MIN)
    if wanted < concurrency:
        raise ConfigError(
            limit_message(
                f"sessions: of {concurrency} clients some would have nothing to do",
                value=f"{wanted} sessions",
                limit=f"at least {concurrency}",
                remedy="ask for more sessions, or for fewer clients",
            )
        )
    return wanted


async def run_load(client: BenchClient, load: Load, finished: Callable[[], None]) -> Figures:
    """Run one load and summarise it; `finished` is called after each request.

    Everything is drawn, and for one-turn cases encoded, before the clock starts.
    """
    for index in range(load.warmup):
        await client.chat_when_ready(load.body(load.draw(-1 - index)[:1]))
    drawn = [load.draw(index) for index in range(load.sessions)]
    if load.shape.turns == 1:
        bodies = [load.body(turns) for turns in drawn]

        async def talk(index: int) -> list[Sample]:
            sample = await client.chat(bodies[index])
            finished()
            return [sample]
    else:

        async def talk(index: int) -> list[Sample]:
            return await _talk(client, load, drawn[index], finished)

    results: list[list[Sample]] = [[] for _ in drawn]

    async def work(indices: Iterator[int]) -> None:
        for index in indices:
            results[index] = await talk(index)

    indices = iter(range(load.sessions))
    began, cpu_began = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, load.sessions)):
            group.create_task(work(indices))
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return summarise(load.case, load.concurrency, results, wall_s=wall_s, cpu_s=cpu_s)


async def _talk(
    client: BenchClient,
    load: Load,
    turns: Sequence[dict[str, Any]],
    finished: Callable[[], None],
) -> list[Sample]:
    """Hold one conversation; it ends early when a turn fails."""
    messages: list[dict[str, Any]] = []
    samples: list[Sample] = []
    for turn in turns:
        messages.append(turn)
        sample = await client.chat(load.body(messages))
        samples.append(sample)
        finished()
        if sample.error is not None:
            break
        # A model with random weights may answer with nothing that can be shown.
        messages.append({"role": "assistant", "content": sample.text or "yes"})
    return samples
