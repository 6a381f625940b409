"""However admission, encoding and caching are configured, each client gets the tokens of `generate`."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.asking import TEXTS, Ask, data_url, drawn_image, read
from tests.e2e.conftest import assert_idle
from tests.e2e.tower import Tower
from tests.patience import patience, until
from vsched import Config, Engine, SamplingParams
from vsched.aio.streams import Generation

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]

THRASHING_PAGES = 4
"""Embedding pages for thrashing: exactly the pages of the images of the largest request."""
PAGE_ROWS = 64


def admissions(stage: str) -> dict[str, tuple[str, ...]]:
    """Return the admission policies of a stage with settings small enough to bind."""
    chosen = {
        "fifo": (),
        "token-budget": ("max_tokens=128", "max_items=3"),
        "priority": ("max_tokens=128", "max_items=2", "ageing_s=0.05"),
    }
    return {
        name: tuple(f"{stage}.admission.{each}" for each in (f"use={name}", *fields))
        for name, fields in chosen.items()
    }


FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "encoding": {
        "chunk-aware": (),
        "look-ahead": ("encode.encoding.look_ahead_chunks=1",),
        "eager": ("encode.encoding.look_ahead_chunks=100",),
    },
    "eviction": {
        "lru": (),
        "s3-fifo": ("encode.eviction.use=s3-fifo",),
        "none": ("encode.eviction.use=none",),
    },
    "embeddings": {"roomy": (), "thrashing": ()},
    "prefix": {"on": (), "off": ("generate.prefix_cache=false",)},
    "encode_admission": admissions("encode"),
    "generate_admission": admissions("generate"),
    "prefix_eviction": {
        "lru": (),
        "s3-fifo": ("generate.eviction.use=s3-fifo",),
        "none": ("generate.eviction.use=none",),
    },
    "features": {"raw": (), "brought": ("media.allow_embeddings=true",)},
    "family": {"nano25": (), "nano3": ()},
}
"""Factor, its values, and the settings of each."""
HOSTILE = "look-ahead s3-fifo thrashing on priority priority s3-fifo brought nano25"
DRAWN = 9


def drawn_combinations() -> list[str]:
    """Return combinations drawn with a fixed seed; each value of a factor is in three or more of them."""
    rng, columns = random.Random(1), []
    for values in FACTORS.values():
        column = list(itertools.islice(itertools.cycle(values), DRAWN))
        rng.shuffle(column)
        columns.append(column)
    return [" ".join(row) for row in zip(*columns, strict=True)]


KV_TOKENS = 304
"""Not enough for the first two questions at once, whatever the timing and the policies."""
WIDE = drawn_image(900, (300, 250))
IMAGES = [drawn_image(901 + number, size) for number, size in enumerate([(90, 60), (140, 100)] * 3)]


@dataclass(frozen=True)
class Conversation(Ask):
    """The turns of a chat so far: an image and a text each, and the answers."""

    texts: Sequence[str] = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        for text, image in zip(self.texts, self.images, strict=True):
            if said:
                said.append({"role": "assistant", "content": "The first image is brighter."})
            said += Ask(text, [image]).messages
        return said


@dataclass(frozen=True)
class Question:
    """One request; the images at `brought` are sent as embeddings if that is allowed."""

    ask: Ask
    brought: tuple[int, ...] = ()
    priority: int = 0
    ttft_target_ms: int | None = None


FIRST = 2
"""Clients whose questions are being answered before the others ask; one of the answers is preempted."""
CLIENTS = [
    [Question(Ask(TEXTS[3], count=70))],
    [Question(Ask("Look: " + TEXTS[3], count=70))],
    [Question(Ask(TEXTS[3], [IMAGES[3]], count=14))],
    [Question(Ask(TEXTS[0], [WIDE], count=24), priority=2), Question(Ask(TEXTS[4], [WIDE]))],
    [Question(Ask(TEXTS[2], IMAGES[3:6], count=26), ttft_target_ms=50)],
    [Question(Ask(TEXTS[2], [IMAGES[0], IMAGES[0], IMAGES[4]], count=22))],
    [
        Question(Conversation(images=IMAGES[: turn + 1], count=14, texts=TEXTS[: turn + 1]))
        for turn in range(3)
    ],
    [Question(Ask(TEXTS[4], [IMAGES[1], IMAGES[5], WIDE], count=16), brought=(0, 2))],
    [Question(Ask(TEXTS[1], IMAGES[2:4]), priority=1)],
]
"""Questions of each client, asked one after the other; the clients ask at the same time."""
DISTINCT_IMAGES, DISTINCT_BROUGHT = 7, 2


@pytest.fixture(scope="module")
def answers(generated: Callable[..., list[list[int]]]) -> Callable[[str], list[list[list[int]]]]:
    """Return a function for the outputs of `generate` by client and turn."""
    return functools.cache(
        lambda family: [generated(family, [one.ask for one in client]) for client in CLIENTS]
    )


async def check_answers(
    engine: Engine, tower: Tower | None, wanted: Sequence[Sequence[list[int]]]
) -> None:
    """Begin the first answers, then let all clients ask at the same time; with a tower, some send embeddings."""

    async def begin(number: int, turn: int) -> Generation:
        question = CLIENTS[number][turn]
        ask = question.ask
        images = [
            tower.embed(image) if tower and index in question.brought else data_url(image)
            for index, image in enumerate(ask.images)
        ]
        return await engine.generate(
            prompt=engine.preprocessor.render(ask.messages),
            images=images,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=ask.count),
            request_id=f"{number}-{turn}",
            priority=question.priority,
            ttft_target_ms=question.ttft_target_ms,
        )

    async def check(number: int, begun: Generation | None) -> None:
        for turn, tokens in enumerate(wanted[number]):
            found = await read(begun or await begin(number, turn))
            assert found.token_ids == tokens, f"client {number}, turn {turn}"

    async with patience(), asyncio.TaskGroup() as group:
        first = [await begin(number, 0) for number in range(FIRST)]
        await until(lambda: all(stream.output_tokens for stream in first), "both are running")
        for number in range(len(CLIENTS)):
            group.create_task(check(number, first[number] if number < FIRST else None))


@pytest.mark.parametrize(
    "row",
    [HOSTILE, *(pytest.param(row, marks=pytest.mark.thorough) for row in drawn_combinations())],
)
async def test_combination_of_policies_equals_generate(
    row: str,
    answers: Callable[[str], list[list[list[int]]]],
    configure: Callable[..., Config],
) -> None:
    """Cached, thrashing, preempted, with client embeddings, whatever the policies are."""
    combination = dict(zip(FACTORS, row.split(), strict=True))
    family, keeps = combination["family"], combination["eviction"] != "none"
    thrashes = combination["embeddings"] == "thrashing"
    brings = combination["features"] == "brought"
    settings = [line for factor, value in combination.items() for line in FACTORS[factor][value]]
    settings.append(f'generate.memory={{use="pinned", tokens={KV_TOKENS}}}')
    tower = Tower.load(configure(family).model.path)
    if thrashes:
        size = THRASHING_PAGES * PAGE_ROWS * tower.info.embedding_row_bytes
        settings.append(f"arena.embedding_bytes={size}")
    async with Engine(configure(family, *settings)) as engine:
        await check_answers(engine, tower if brings else None, answers(family))
        await assert_idle(engine)
        counts = engine.statistics()
    encode, generate = counts["encode"], counts["generate"]
    copied = DISTINCT_BROUGHT if brings else 0
    if thrashes:
        assert (encode["cache_evictions"] > 0) == keeps
        assert encode["items_encoded"] > DISTINCT_IMAGES, "no image was encoded again"
    elif keeps:
        assert (encode["items_encoded"], encode["items_copied"]) == (DISTINCT_IMAGES, copied)
    assert (encode["items_copied"] > 0) == brings
    assert (encode["cache_preemptions"] > 0) <= thrashes
    assert generate["preemptions"] > 0, "no request was preempted"
    cached = max(generate["tokens_cached"], generate["prefix_evictions"])
    assert (cached > 0) <= (combination["prefix"] == "on")
