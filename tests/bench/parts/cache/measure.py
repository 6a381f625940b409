"""Caching embeddings per image: four measurements on a real engine.

`conversation`: turn k contains k images. The prefix cache is off, so that every turn needs the
embeddings of all its images and only the embedding cache can help: with `combined` (one entry for a
request's whole set of images) a new image makes the whole set new, with `chunk-aware` only the new
image is encoded.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from vsched.bench.load.generator import draw_image
from vsched.config import load_config
from vsched.engine import Engine
from vsched.errors import RequestRefused
from vsched.types import SamplingParams

ENCODINGS = ("combined", "chunk-aware")
ANSWER_TOKENS = 8


class ConversationTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, medians over the repeats; milliseconds."""

    turn: int
    images: int
    encode_ms: float
    ttft_ms: float


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """All turns of one encoding policy at one image size."""

    encoding: str
    image_pixels: int
    image_tokens: int
    turns: list[ConversationTurn]
    answers: list[list[int]]


class CapacityProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Number of images in a conversation before it was refused, or the maximum tried."""

    encoding: str
    images: int
    refusal: str
    served_after: bool


class GapsBesideImages(msgspec.Struct, frozen=True, kw_only=True):
    """Inter-token latency of decoding requests while another client sends large images; milliseconds."""

    decoders: int
    images: int
    image_tokens: int
    gap_p50_ms: float
    gap_p99_ms: float
    gap_worst_ms: float
    alone_p50_ms: float


@asynccontextmanager
async def _engine(settings: Sequence[str]) -> AsyncIterator[Engine]:
    config = load_config(None, sets=settings, environ={}).config
    async with Engine(config) as engine:
        yield engine


def _prompt(engine: Engine, turns: int) -> str:
    """Return a conversation in which every user turn begins with an image."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        if turn:
            messages.append({"role": "assistant", "content": f"I see picture {turn}."})
        parts = [
            {"type": "image_url", "image_url": {"url": ""}},
            {"type": "text", "text": f"This is picture {turn + 1}. What does it show?"},
        ]
        messages.append({"role": "user", "content": parts})
    return engine.preprocessor.render(messages)


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    ttft_ms: float
    token_ids: list[int]
    gaps_ms: list[float]


_numbers = itertools.count()


async def _ask(
    engine: Engine,
    prompt: str,
    images: list[str],
    *,
    tokens: int,
    on_first: Callable[[], object] | None = None,
) -> _Asked:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    started_s = time.perf_counter()
    generation = await engine.generate(
        prompt=prompt, images=images, sampling=sampling, request_id=f"bench-{next(_numbers)}"
    )
    token_ids: list[int] = []
    stamps: list[float] = []
    async for delta in generation:
        if delta.token_ids:
            if on_first is not None and not stamps:
                on_first()
            stamps.append(time.perf_counter())
            token_ids += delta.token_ids
    gaps = [(after - before) * 1e3 for before, after in itertools.pairwise(stamps)]
    return _Asked(ttft_ms=(stamps[0] - started_s) * 1e3, token_ids=token_ids, gaps_ms=gaps)


async def measure_conversations(
    settings: Sequence[str],
    *,
    image_pixels: int,
    turns: int,
    repeats: int,
    advanced: Callable[[], None],
) -> list[Conversation]:
    """Measure both encoding policies, interleaved: one conversation each per repeat."""
    samples: dict[str, list[list[tuple[float, _Asked]]]] = {name: [] for name in ENCODINGS}
    tokens = 0
    for repeat in range(repeats):
        for name in ENCODINGS:
            sets = [*settings, f"encode.encoding.use={name}", "generate.prefix_cache=false"]
            async with _engine(sets) as engine:
                tokens = engine.preprocessor.plan_image(image_pixels, image_pixels).tokens
                await _ask(engine, _prompt(engine, 1), [draw_image(10**6, image_pixels)], tokens=2)
                rows = []
                for turn in range(1, turns + 1):
                    images = [draw_image(repeat * 1000 + i, image_pixels) for i in range(turn)]
                    before_ms = engine.statistics()["busy_ms"]["encode"]
                    requested = await _ask(
                        engine, _prompt(engine, turn), images, tokens=ANSWER_TOKENS
                    )
                    rows.append((engine.statistics()["busy_ms"]["encode"] - before_ms, requested))
                    advanced()
                samples[name].append(rows)
    return [
        Conversation(
            encoding=name,
            image_pixels=image_pixels,
            image_tokens=tokens,
            turns=[
                ConversationTurn(
                    turn=turn + 1,
                    images=turn + 1,
                    encode_ms=round(statistics.median(run[turn][0] for run in runs), 2),
                    ttft_ms=round(statistics.median(run[turn][1].ttft_ms for run in runs), 2),
                )
                for turn in range(turns)
            ],
            answers=[requested.token_ids for run in runs for _, requested in run],
        )
        for name, runs in samples.items()
    ]


async def measure_probe(
    settings: Sequence[str], *, encoding: str, image_pixels: int, images_max: int, room: int
) -> CapacityProbe:
    """Extend a conversation image by image until it is refused, with memory for `room` embeddings."""
    sets = [*settings, f"encode.encoding.use={encoding}"]
    async with _engine(sets) as engine:
        tokens = engine.preprocessor.plan_image(image_pixels, image_pixels).tokens
        row_bytes = engine.info.embedding_row_bytes
    pages = -(-tokens // 64) * room
    sets.append(f"arena.embedding_bytes={pages * 64 * row_bytes}")
    refusal = ""
    async with _engine(sets) as engine:
        held = 0
        for count in range(1, images_max + 1):
            images = [draw_image(index, image_pixels) for index in range(count)]
            try:
                await _ask(engine, _prompt(engine, count), images, tokens=2)
            except RequestRefused as error:
                refusal = error.message
                break
            held = count
        requested = await _ask(engine, _prompt(engine, 1), [draw_image(0, image_pixels)], tokens=2)
    return CapacityProbe(
        encoding=encoding, images=held, refusal=refusal, served_after=len(requested.token_ids) == 2
    )


async def measure_same_image(settings: Sequence[str], *, clients: int, image_pixels: int) -> int:
    """Send one image from many clients at once; return the number of times it was encoded."""
    async with _engine(settings) as engine:
        prompt, image = _prompt(engine, 1), draw_image(1, image_pixels)
        await asyncio.gather(
            *(_ask(engine, prompt, [image], tokens=ANSWER_TOKENS) for _ in range(clients))
        )
        encoded: int = engine.statistics()["encode"]["items_encoded"]
    return encoded


async def measure_mixed(
    settings: Sequence[str], *, decoders: int, images: int, image_pixels: int, tokens: int
) -> GapsBesideImages:
    """Measure decoding requests while one client sends a request with large images."""
    pictures = [draw_image(index, image_pixels) for index in range(images)]
    async with _engine(settings) as engine:
        plan = engine.preprocessor.plan_image(image_pixels, image_pixels)
        text = engine.preprocessor.render([{"role": "user", "content": "Tell me a long story."}])
        alone = await asyncio.gather(
            *(_ask(engine, text, [], tokens=tokens // 4) for _ in range(decoders))
        )
        decoding = asyncio.Semaphore(0)
        running = [
            asyncio.create_task(_ask(engine, text, [], tokens=tokens, on_first=decoding.release))
            for _ in range(decoders)
        ]
        for _ in range(decoders):
            await decoding.acquire()
        large = asyncio.create_task(_ask(engine, _prompt(engine, images), pictures, tokens=2))
        requested = await asyncio.gather(*running)
        await large
    gaps = sorted(gap for one in requested for gap in one.gaps_ms)
    return GapsBesideImages(
        decoders=decoders,
        images=images,
        image_tokens=plan.tokens,
        gap_p50_ms=round(statistics.median(gaps), 2),
        gap_p99_ms=round(gaps[int(len(gaps) * 0.99)], 2),
        gap_worst_ms=round(gaps[-1], 2),
        alone_p50_ms=round(statistics.median(gap for one in alone for gap in one.gaps_ms), 2),
    )
