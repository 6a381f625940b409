"""The load generator: one process, one loop, and the same bytes in the same order for every server.

Everything is drawn before the measurement starts. Each repeat and each concurrency has its own
seeds, so that a server's caches hold only content that is part of the case. In a conversation the
assistant messages are drawn too: outputs of two servers may differ in a token, but the prompts of
later turns must not.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from vsched.bench.load.cases import draw_session, draw_text
from vsched.bench.load.client import BenchClient, Sample
from vsched.bench.load.figures import NOT_ASKED, Answers, Figures, summarise
from vsched.bench.load.shapes import Case, Shape
from vsched.errors import ConfigError, limit_message

WARMUP = 2
REPLY_WORDS = 12
DECODER_TOKENS = 256
RUNNING_PIECES = 4
"""Pieces of text after which a decoding request counts as running."""
_SESSIONS_MIN = 8

Message = dict[str, Any]
Body = Callable[[list[Message], int], bytes]
"""Creates the body of a request from its messages and its number of output tokens."""


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """One run, without the server.

    Attributes:
        concurrency: Concurrent sessions; in `mixed`, decoding requests, and images that arrive at
            once.
        sessions: Total number of sessions; ignored in `mixed`.
        seed: Draws other texts and images.
        warmup: Requests before the measurement.
        decoder_tokens: Tokens of each decoding request in `mixed`.
    """

    case: Case
    shape: Shape
    concurrency: int
    sessions: int
    seed: str = "0"
    warmup: int = WARMUP
    decoder_tokens: int = DECODER_TOKENS

    @property
    def requests(self) -> int:
        """Total number of requests."""
        mixed = self.case is Case.MIXED
        return self.concurrency * 2 if mixed else self.sessions * self.shape.turns


@dataclass(frozen=True, kw_only=True)
class DrawnLoad:
    """Messages to send: one list per turn of each session, and those for warm-up."""

    plan: LoadPlan
    sessions: list[list[list[Message]]]
    warmup: list[list[Message]]


def sessions_for(case: Case, concurrency: int, wanted: int | None) -> int:
    """Return the number of sessions of a run: `wanted`, or by default enough to measure a case within minutes.

    Raises:
        ConfigError: When some clients would have nothing to do.
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


def draw(plan: LoadPlan) -> DrawnLoad:
    """Draw everything for one run."""
    seeded = functools.partial(_seed, plan.case, plan.concurrency, plan.seed)
    if plan.case is Case.MIXED:
        kind, count = Case.IMAGE, range(plan.concurrency)
        sessions = [_session(Case.TEXT, plan.shape, seeded("decoder", index)) for index in count]
        sessions += [_session(kind, plan.shape, seeded("burst", index)) for index in count]
    else:
        kind = plan.case
        sessions = [_session(kind, plan.shape, seeded(index)) for index in range(plan.sessions)]
    warm = range(plan.warmup)
    warmup = [_session(kind, plan.shape, seeded("warm", index))[0] for index in warm]
    return DrawnLoad(plan=plan, sessions=sessions, warmup=warmup)


def _seed(*parts: object) -> int:
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _session(case: Case, shape: Shape, seed: int) -> list[list[Message]]:
    """Return all messages of each turn."""
    rng = random.Random(seed)  # noqa: S311 - a load, not a secret
    history: list[Message] = []
    turns: list[list[Message]] = []
    for message in draw_session(case, shape, seed):
        history.append(message)
        turns.append(list(history))
        history.append({"role": "assistant", "content": draw_text(rng, REPLY_WORDS)})
    return turns


async def run(
    client: BenchClient, drawn: DrawnLoad, body: Body, *, finished: Callable[[], None]
) -> Figures:
    """Warm a server up and run a load against it; `finished` is called after each request."""
    plan = drawn.plan
    if plan.case is Case.SAMPLED:
        body = functools.partial(_without_temperature, body)
    for messages in drawn.warmup:
        await client.chat_when_ready(body(messages, plan.shape.output_tokens))
    measure = _burst if plan.case is Case.MIXED else _closed_loop
    choices = await measure(client, drawn, body, finished)
    return summarise(plan.case, plan.concurrency, choices)


def _without_temperature(body: Body, messages: list[Message], tokens: int) -> bytes:
    """Return the body of a request that uses the server's sampling defaults."""
    content = msgspec.json.decode(body(messages, tokens))
    del content["temperature"]
    return msgspec.json.encode(content)


async def _closed_loop(
    client: BenchClient, drawn: DrawnLoad, body: Body, finished: Callable[[], None]
) -> Answers:
    """Keep `concurrency` sessions open, each waiting for its responses."""
    plan = drawn.plan
    tokens = plan.shape.output_tokens
    bodies = [[body(turn, tokens) for turn in session] for session in drawn.sessions]
    results: list[list[Sample]] = [[] for _ in bodies]

    async def talk(index: int) -> None:
        for turn in bodies[index]:
            sample = await client.chat(turn)
            results[index].append(sample)
            finished()
            if sample.error is not None:
                break
        for _ in bodies[index][len(results[index]) :]:
            results[index].append(Sample(0.0, error=NOT_ASKED))
            finished()

    indices = iter(range(len(bodies)))

    async def work() -> None:
        for index in indices:
            await talk(index)

    began, cpu_began = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(plan.concurrency, len(bodies))):
            group.create_task(work())
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    counts = [tokens] * plan.requests
    return Answers(sessions=results, tokens=counts, wall_s=wall_s, cpu_s=cpu_s)


async def _burst(
    client: BenchClient, drawn: DrawnLoad, body: Body, finished: Callable[[], None]
) -> Answers:
    """Start the decoding requests, wait until all of them run, and send all images at once."""
    plan = drawn.plan
    count = plan.concurrency
    tokens = [plan.decoder_tokens] * count + [plan.shape.output_tokens] * count
    bodies = [
        body(session[0], wanted) for session, wanted in zip(drawn.sessions, tokens, strict=True)
    ]
    running = asyncio.Semaphore(0)

    def note(sample: Sample) -> None:
        if len(sample.stamps) == RUNNING_PIECES:
            running.release()

    async def ask(index: int) -> Sample:
        sample = await client.chat(bodies[index])
        if len(sample.stamps) < RUNNING_PIECES:
            running.release()  # failed or almost without text: do not wait for it
        finished()
        return sample

    client.on_text = note
    began, cpu_began = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        decoders = [group.create_task(ask(index)) for index in range(count)]
        for _ in range(count):
            await running.acquire()
        client.on_text = None
        burst_began = time.perf_counter()
        images = [group.create_task(ask(count + index)) for index in range(count)]
        await asyncio.wait(images)
        burst_ended = time.perf_counter()
    return Answers(
        sessions=[[task.result()] for task in decoders + images],
        tokens=tokens,
        decoders=range(count),
        burst=(burst_began, burst_ended),
        wall_s=time.perf_counter() - began,
        cpu_s=time.process_time() - cpu_began,
    )
