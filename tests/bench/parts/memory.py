"""`python -m tests.bench.parts memory`: an adversarial load under a hard memory limit, for two memory policies.

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
from collections.abc import Sequence
from pathlib import Path
from string import printable
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from vsched.assembly import inspect_checkpoint
from vsched.bench.load.generator import draw_image
from vsched.config import load_config
from vsched.config.policies import resolve_policies
from vsched.config.sections import size_bytes
from vsched.engine import Engine
from vsched.errors import RequestFailed, RequestRefused, VschedError
from vsched.memory import size_text
from vsched.policy import Build, MemoryPlan, MemoryPolicy, MemoryView
from vsched.terminal.options import SetOption
from vsched.types import SamplingParams
from vsched.worker.memory import status_bytes

SAMPLE_S = 0.05
PICTURES = 4
OUTPUT_TOKENS = 8
FILLER_TOKENS = 64


class Share(MemoryPolicy, frozen=True, kw_only=True):
    """A share of the memory left by the weights, without a profiling run."""

    def plan(self, view: MemoryView) -> MemoryPlan:
        free = min(rank.available_bytes for rank in view.ranks)
        tokens = int(self.mem_fraction * free) // view.bytes_per_token
        yield Build(tokens // view.block_size * view.block_size, profile=False)


POLICIES = {
    "auto-profile": ['generate.memory={use="auto-profile"}'],
    "share 0.9, nothing reserved": [
        'generate.memory={use="tests.bench.parts.memory:Share", mem_fraction=0.9}',
        "encode.reserved=0",
    ],
}
Verdict = Literal["kept", "broken", "no start", "inconclusive"]


class MemoryRun(msgspec.Struct, kw_only=True):
    """Result of one memory policy.

    `refusals` counts requests refused at once, `lost` accepted requests that ended with an error,
    both by code. `losses` counts rank processes that ended. `peak_bytes` is private memory of the
    rank that used the most.
    """

    kv_tokens: int = 0
    start_s: float = 0.0
    failure: str = ""
    served: int = 0
    refusals: Counter[str] = msgspec.field(default_factory=Counter)
    lost: Counter[str] = msgspec.field(default_factory=Counter)
    losses: int = 0
    peak_bytes: int = 0

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
    settings: Sequence[str], *, seconds: float, answers_min: int = 0
) -> MemoryRun:
    """Start an engine, load it, and report the result.

    The load ends after `seconds`, but not before `answers_min` requests have ended in any way.
    """
    run = MemoryRun()
    started_s = time.perf_counter()
    engine = Engine(load_config(None, sets=settings, environ={}).config)
    try:
        async with engine:
            run.start_s = round(time.perf_counter() - started_s, 2)
            blocks = engine.statistics()["generate"]["blocks_total"]
            run.kv_tokens = blocks * engine.config.generate.block_size
            await _load(engine, run, seconds, answers_min)
    except VschedError as error:
        run.failure = str(error)
    return run


async def _load(engine: Engine, run: MemoryRun, seconds: float, answers_min: int) -> None:
    """Keep every slot busy with the largest possible requests until the load is over."""
    images = _largest_images(engine) if engine.info.takes_images else []
    # without special tokens
    words = sorted(set(engine.preprocessor.tokenize(printable, images=False)))
    ends_s = time.perf_counter() + seconds
    slots = engine.config.generate.slots

    def is_over() -> bool:
        answers = run.served + run.refusals.total() + run.lost.total()
        return time.perf_counter() >= ends_s and answers >= answers_min

    async def client(number: int) -> None:
        rng = random.Random(number)
        turn = 0
        while not is_over():
            kind = (number + turn) % 4
            prompt, pictures, tokens = _request(engine, images, words, rng, kind=kind)
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
                run.served += 1
            except RequestRefused as error:
                run.refusals[error.code] += 1
                await asyncio.sleep(0.05)
            except RequestFailed as error:
                run.lost[error.code] += 1

    clients = [asyncio.create_task(client(number)) for number in range(slots + slots // 4)]
    pids: set[int] = set()
    while not is_over():
        pids.update(engine.rank_pids)
        run.peak_bytes = max(run.peak_bytes, *map(_private_bytes, engine.rank_pids), 0)
        await asyncio.sleep(SAMPLE_S)
    run.losses = len(pids) - len(engine.rank_pids)
    for one in clients:
        one.cancel()  # a request that still runs is not lost: its client disconnects
    for outcome in await asyncio.gather(*clients, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


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
        image = {"type": "image_url", "image_url": {"url": ""}}
        parts = [image, {"type": "text", "text": "What is it?"}]
        prompt = engine.preprocessor.render([{"role": "user", "content": parts}])
        return prompt, [rng.choice(images)], OUTPUT_TOKENS
    return rng.choices(words, k=8), [], FILLER_TOKENS


def _private_bytes(pid: int) -> int:
    """Return the memory counted by the limit of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return status_bytes("VmData", Path(f"/proc/{pid}/status"))
    return 0


def memory(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    limit: Annotated[str, typer.Option(help="Hard limit on a rank, as in 2GiB.")] = "900MiB",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of load for each policy.")] = 30,
) -> None:
    """Load two servers to the maximum under a hard limit: one with profiled memory, one with a fixed share."""
    console = Console()
    limit_bytes = size_bytes(limit, path="--limit")
    settings = [*default_settings(path), *(assignments or ())]
    settings.append(f"generate.memory_limit={limit_bytes}")
    runs = {
        policy: asyncio.run(measure_memory([*settings, *overrides], seconds=seconds))
        for policy, overrides in POLICIES.items()
    }
    names = ("policy", "KV tokens", "start s", "served", "refused", "lost", "ranks lost", "promise")
    table = Table(*names, title=f"{seconds:g} s under a limit of {size_text(limit_bytes)}")
    for policy, run in runs.items():
        refused, lost = run.refusals.total(), run.lost.total()
        counts = (run.kv_tokens, run.start_s, run.served, refused, lost, run.losses)
        table.add_row(policy, *map(str, counts), run.verdict)
    console.print(table)
    for policy, run in runs.items():
        if run.verdict != "kept":
            console.print(f"{policy}: {run.verdict}: {run.failure} {run.lost}", markup=False)
