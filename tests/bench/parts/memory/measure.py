"""An adversarial load under a hard memory limit, to test the promises of memory policies.

Every client sends the largest legal requests: prompts that fill the context, images of the maximum
size, and enough clients that every slot decodes. A server that profiled its memory must serve all
of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from string import printable
from typing import Literal

import msgspec

from vsched.assembly import inspect_checkpoint
from vsched.bench.load.generator import draw_image
from vsched.config import load_config
from vsched.config.policies import resolve_policies
from vsched.engine import Engine
from vsched.errors import RequestFailed, RequestRefused, VschedError
from vsched.types import SamplingParams

SAMPLE_S = 0.05
PICTURES = 4
OUTPUT_TOKENS = 8
FILLER_TOKENS = 64


Verdict = Literal["kept", "broken", "no start", "inconclusive"]


class MemorySample(msgspec.Struct, frozen=True, array_like=True):
    """Private memory of the rank that uses the most, in bytes, with the sampling time."""

    seconds: float
    bytes: int


class MemoryRun(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one memory policy.

    `refusals` counts requests refused at once, `lost` accepted requests that ended with an error,
    both by code. `losses` counts rank processes that ended.
    """

    policy: str
    limit_bytes: int
    kv_tokens: int
    start_s: float
    failure: str = ""
    served: int = 0
    refusals: dict[str, int] = {}
    lost: dict[str, int] = {}
    losses: int = 0
    samples: list[MemorySample] = []

    @property
    def verdict(self) -> Verdict:
        """Whether it served requests and lost none; inconclusive if nothing finished."""
        if self.lost or self.losses:
            return "broken"
        if self.failure:
            return "no start"
        return "kept" if self.served else "inconclusive"


def default_settings(path: str) -> list[str]:
    """Return a load for a checkpoint, with contexts and images as large as possible, up to 8,192 and 4,096 tokens.

    Raises:
        CheckpointError: When it cannot be read.
    """
    config = load_config(None, sets=[f"model.path={path}"], environ={}).config
    context_tokens = min(inspect_checkpoint(config, resolve_policies(config)).context_tokens, 8192)
    return [
        # Both stages in one process, so that one limit covers all their memory.
        "placement=together",
        "encode.memory_limit=1MiB",
        f"generate.context_tokens={context_tokens}",
        # An image may have as many tokens as a step, and one fits into the context.
        f"generate.max_batch_tokens={context_tokens // 2}",
        # Few enough that many rounds fit in the time.
        "generate.slots=12",
        "generate.step_target_ms=0",
        f"model.path={path}",
    ]


async def measure_memory(
    settings: Sequence[str],
    *,
    policy: str,
    overrides: Sequence[str],
    limit_bytes: int,
    seconds: float,
    answers_min: int = 0,
    advanced: Callable[[float], None],
) -> MemoryRun:
    """Start an engine with a memory policy under the limit, load it, and report the result.

    The load ends after `seconds`, but not before `answers_min` requests have ended in any way.
    """
    sets = [*settings, f"generate.memory_limit={limit_bytes}", *overrides]
    started_s = time.perf_counter()
    engine = Engine(load_config(None, sets=sets, environ={}).config)
    samples: list[MemorySample] = []
    try:
        async with engine:
            start_s = time.perf_counter() - started_s
            kv_tokens = (
                engine.statistics()["generate"]["blocks_total"] * engine.config.generate.block_size
            )
            async with _sampled(engine, samples) as pids:
                outcomes = await _load(engine, seconds, answers_min, advanced)
            return MemoryRun(
                policy=policy,
                limit_bytes=limit_bytes,
                kv_tokens=kv_tokens,
                start_s=round(start_s, 2),
                served=outcomes.served,
                refusals=dict(outcomes.refusals),
                lost=dict(outcomes.lost),
                losses=len(pids) - len(engine.rank_pids),
                samples=samples,
            )
    except VschedError as error:
        return MemoryRun(
            policy=policy,
            limit_bytes=limit_bytes,
            kv_tokens=0,
            start_s=round(time.perf_counter() - started_s, 2),
            failure=str(error),
        )


async def find_largest(
    settings: Sequence[str], *, limit_bytes: int, headroom_bytes: int, low: int, high: int
) -> int:
    """Return the largest pinned KV cache, in tokens, that passes the same profiling run, by bisection."""
    while high - low > max(low // 200, 256):
        middle = (low + high) // 2
        pinned = f'generate.memory={{use="pinned", tokens={middle}, mem_fraction=1.0, headroom_bytes={headroom_bytes}}}'
        sets = [*settings, f"generate.memory_limit={limit_bytes}", pinned]
        try:
            async with Engine(load_config(None, sets=sets, environ={}).config):
                low = middle
        except VschedError:
            high = middle
    return low


@dataclass
class _Outcomes:
    """Counts of ended requests: served, refused at once, or lost later."""

    served: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def answers(self) -> int:
        return self.served + self.refusals.total() + self.lost.total()


async def _load(
    engine: Engine, seconds: float, answers_min: int, advanced: Callable[[float], None]
) -> _Outcomes:
    """Keep every slot busy with the largest possible requests until the load is over."""
    images = _largest_images(engine) if engine.info.takes_images else []
    # without special tokens
    words = sorted(set(engine.preprocessor.tokenize(printable, images=False)))
    ends_s = time.perf_counter() + seconds
    slots = engine.config.generate.slots
    outcomes = _Outcomes()

    def is_over() -> bool:
        return time.perf_counter() >= ends_s and outcomes.answers >= answers_min

    async def client(number: int) -> None:
        rng = random.Random(number)
        turn = 0
        while not is_over():
            prompt, pictures, tokens = _request(
                engine, images, words, rng, kind=(number + turn) % 4
            )
            turn += 1
            try:
                generation = await engine.generate(
                    prompt=prompt,
                    images=pictures,
                    sampling=SamplingParams(max_tokens=tokens, top_p=0.9, ignore_eos=True),
                    request_id=f"bench-{number}-{turn}",
                )
                try:
                    async for _ in generation:
                        pass
                finally:
                    generation.abort()  # no-op after the end
                outcomes.served += 1
            except RequestRefused as error:
                outcomes.refusals[error.code] += 1
                await asyncio.sleep(0.05)
            except RequestFailed as error:
                outcomes.lost[error.code] += 1

    async def tell() -> None:
        while not is_over():
            left_s = max(ends_s - time.perf_counter(), 0.0)
            advanced(seconds - left_s)
            await asyncio.sleep(min(0.5, left_s or 0.1))

    clients = [asyncio.create_task(client(number)) for number in range(slots + slots // 4)]
    await tell()
    for one in clients:
        one.cancel()  # a request that still runs is not lost: its client disconnects
    for outcome in await asyncio.gather(*clients, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def _largest_images(engine: Engine) -> list[str]:
    """Draw square images with the maximum number of tokens."""
    pixels = 256
    best, tokens = pixels, 0
    while pixels <= 4096:
        try:
            planned = engine.preprocessor.plan_image(pixels, pixels).tokens
        except RequestRefused:
            break
        if planned > tokens:
            best, tokens = pixels, planned
        pixels += 64
    return [draw_image(seed, best) for seed in range(PICTURES)]


def _request(
    engine: Engine, images: list[str], words: Sequence[int], rng: random.Random, *, kind: int
) -> tuple[str | list[int], list[str], int]:
    """Return a prompt that fills the context, has the largest image, or only occupies a slot."""
    if kind == 0 or (kind == 1 and not images):
        tokens = rng.choices(words, k=engine.info.context_tokens - 16)
        return tokens, [], OUTPUT_TOKENS
    if kind == 1:
        picked = [rng.choice(images)]
        return engine.preprocessor.render([_with_images(picked)]), picked, OUTPUT_TOKENS
    return rng.choices(words, k=8), [], FILLER_TOKENS


def _with_images(images: Sequence[str]) -> dict[str, object]:
    parts: list[dict[str, object]] = []
    for number, _ in enumerate(images):
        parts += [
            {"type": "image_url", "image_url": {"url": ""}},
            {"type": "text", "text": f"Picture {number}."},
        ]
    return {"role": "user", "content": parts}


@asynccontextmanager
async def _sampled(engine: Engine, samples: list[MemorySample]) -> AsyncIterator[set[int]]:
    """Sample the memory of the ranks; yields the ids of all rank processes seen."""
    started_s = time.perf_counter()
    pids: set[int] = set()

    async def sample() -> None:
        while True:
            pids.update(engine.rank_pids)
            held = max((_private_bytes(pid) for pid in engine.rank_pids), default=0)
            samples.append(MemorySample(round(time.perf_counter() - started_s, 2), held))
            await asyncio.sleep(SAMPLE_S)

    task = asyncio.create_task(sample())
    try:
        yield pids
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _private_bytes(pid: int) -> int:
    """Return the memory counted by the limit of a process; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), 0)
