"""The load: one process, one loop, and on both sides the same bytes in the same order.

Everything is drawn before a clock runs. What differs between two repeats, or two concurrencies, is drawn from seeds of
its own, so that no cache of a server holds anything but what the case is about. In a conversation the assistant's part
is drawn too: the answers of two servers may differ in a token, and the prompts of later turns must not.
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

from tests.bench.figures import NOT_ASKED, Answers, summarise
from tests.bench.records import Figures
from tests.bench.servers import Spec
from vsched.bench.load.cases import draw_session, draw_text
from vsched.bench.load.client import BenchClient, Sample
from vsched.bench.load.shapes import Case, Shape

MIXED = "mixed"
CASES = (*(case.value for case in Case), MIXED)
WARMUP = 2
REPLY_WORDS = 12
DECODER_TOKENS = 256
RUNNING_PIECES = 4
"""Pieces of text after which a decoder counts as running."""

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run, without the server.

    `sessions` is how many sessions there are in all; in `mixed` it is ignored: there, as many decoders as `concurrency`
    says run when as many images arrive at once.
    """

    case: str
    shape: Shape
    concurrency: int
    sessions: int
    seed: str
    decoder_tokens: int = DECODER_TOKENS

    @property
    def requests(self) -> int:
        """How many requests there will be."""
        return self.concurrency * 2 if self.case == MIXED else self.sessions * self.shape.turns


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What is sent: the messages of each session, one list a turn, and those that warm up."""

    plan: Plan
    sessions: list[list[list[Message]]]
    warmup: list[list[Message]]


class WatchingClient(BenchClient):
    """A client that tells when a stream has brought so many pieces."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        super().__init__(url, timeout_s=timeout_s)
        self.running: Callable[[Sample], None] | None = None

    def _take_events(self, body: bytearray, sample: Sample) -> None:
        before = len(sample.stamps)
        super()._take_events(body, sample)
        if self.running is not None and before < RUNNING_PIECES <= len(sample.stamps):
            self.running(sample)


def _seed(*parts: object) -> int:
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _session(case: Case, shape: Shape, seed: int) -> list[list[Message]]:
    """Return the whole messages of each turn."""
    rng = random.Random(seed)
    history: list[Message] = []
    turns: list[list[Message]] = []
    for message in draw_session(case, shape, seed):
        history.append(message)
        turns.append(list(history))
        history.append({"role": "assistant", "content": draw_text(rng, REPLY_WORDS)})
    return turns


def draw(plan: Plan) -> Drawn:
    """Draw everything of one run."""
    kind = Case.IMAGE if plan.case == MIXED else Case(plan.case)
    seeded = functools.partial(_seed, plan.case, plan.concurrency, plan.seed)
    if plan.case == MIXED:
        texts = [
            _session(Case.TEXT, plan.shape, seeded("decoder", index))
            for index in range(plan.concurrency)
        ]
        images = [
            _session(kind, plan.shape, seeded("burst", index)) for index in range(plan.concurrency)
        ]
        sessions = texts + images
    else:
        sessions = [_session(kind, plan.shape, seeded(index)) for index in range(plan.sessions)]
    warmup = [_session(kind, plan.shape, seeded("warm", index))[0] for index in range(WARMUP)]
    return Drawn(plan=plan, sessions=sessions, warmup=warmup)


async def run(
    drawn: Drawn, spec: Spec, *, timeout_s: float, finished: Callable[[], None]
) -> Figures:
    """Run it against a server; `finished` is called after each request."""
    client = WatchingClient(spec.url, timeout_s=timeout_s)
    plan = drawn.plan
    for messages in drawn.warmup:
        await client.chat(spec.body(messages, plan.shape.output_tokens))
    measure = _burst if plan.case == MIXED else _closed_loop
    return summarise(await measure(client, drawn, spec, finished))


async def _closed_loop(
    client: WatchingClient, drawn: Drawn, spec: Spec, finished: Callable[[], None]
) -> Answers:
    """Keep so many sessions open at a time, each waiting for its answers."""
    plan = drawn.plan
    tokens = plan.shape.output_tokens
    bodies = [[spec.body(turn, tokens) for turn in session] for session in drawn.sessions]
    results: list[list[Sample]] = [[] for _ in bodies]

    async def talk(index: int) -> None:
        for body in bodies[index]:
            sample = await client.chat(body)
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
        for _ in range(plan.concurrency):
            group.create_task(work())
    answers = Answers(wall_s=time.perf_counter() - began, cpu_s=time.process_time() - cpu_began)
    answers.samples = [sample for session in results for sample in session]
    answers.tokens = [tokens] * len(answers.samples)
    return answers


async def _burst(
    client: WatchingClient, drawn: Drawn, spec: Spec, finished: Callable[[], None]
) -> Answers:
    """Start the decoders, wait until all of them run, and send all images at once."""
    plan = drawn.plan
    count = plan.concurrency
    tokens = [plan.decoder_tokens] * count + [plan.shape.output_tokens] * count
    bodies = [
        spec.body(session[0], wanted)
        for session, wanted in zip(drawn.sessions, tokens, strict=True)
    ]
    running = asyncio.Semaphore(0)
    client.running = lambda _: running.release()

    async def ask(index: int) -> Sample:
        sample = await client.chat(bodies[index])
        if len(sample.stamps) < RUNNING_PIECES:
            running.release()  # it failed, or says next to nothing: nobody waits for it
        finished()
        return sample

    began, cpu_began = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        decoders = [group.create_task(ask(index)) for index in range(count)]
        for _ in range(count):
            await running.acquire()
        client.running = None
        burst_began = time.perf_counter()
        images = [group.create_task(ask(count + index)) for index in range(count)]
        await asyncio.wait(images)
        burst_ended = time.perf_counter()
    return Answers(
        samples=[task.result() for task in decoders + images],
        tokens=tokens,
        decoders=range(count),
        burst=(burst_began, burst_ended),
        wall_s=time.perf_counter() - began,
        cpu_s=time.process_time() - cpu_began,
    )
