"""However admission, encoding and caching are configured, each client gets the tokens of `generate`."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from tests.e2e.asking import begin, data_url, mixed_asks, read
from tests.e2e.conftest import TIGHT, assert_idle
from tests.patience import patience
from vsched import Config, Engine
from vsched_workers.plugin import plugin

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]

THRASHING_PAGES = 4
"""Embedding pages for thrashing: exactly the pages of the images of the largest request."""
PAGE_ROWS = 64
CLIENTS = 8


FACTORS: dict[str, dict[str, Sequence[str]]] = {
    "encoding": {
        "chunk-aware": (),
        "look-ahead": ("encode.encoding.look_ahead_chunks=1",),
        "eager": ("encode.encoding.look_ahead_chunks=100",),
    },
    "eviction": {name: (f"encode.eviction.use={name}",) for name in ("lru", "s3-fifo", "none")},
    "embeddings": {"roomy": (), "thrashing": ()},
    "prefix": {"on": (), "off": ("generate.prefix_cache=false",)},
}
for stage in ("encode", "generate"):
    FACTORS[f"{stage}_admission"] = {
        name: [f"{stage}.admission.{each}" for each in (f"use={name}", *fields)]
        for name, fields in {
            "fifo": (),
            "token-budget": ("max_tokens=128", "max_items=3"),
            "priority": ("max_tokens=128", "max_items=2", "ageing_s=0.05"),
        }.items()
    }
FACTORS["prefix_eviction"] = {
    name: (f"generate.eviction.use={name}",) for name in ("lru", "s3-fifo", "none")
}
FACTORS["family"] = {"nano25": (), "nano3": ()}
"""Values of each factor, with their settings; limits of admission policies are small enough to bind."""
HOSTILE = "look-ahead s3-fifo thrashing on priority priority s3-fifo nano25"
DRAWN = 9


def drawn_combinations() -> list[str]:
    """Return combinations drawn with a fixed seed; each value of a factor is in three or more of them."""
    rng, columns = random.Random(1), []
    for values in FACTORS.values():
        column = list(itertools.islice(itertools.cycle(values), DRAWN))
        rng.shuffle(column)
        columns.append(column)
    return [" ".join(row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize(
    "row",
    [HOSTILE, *(pytest.param(row, marks=pytest.mark.thorough) for row in drawn_combinations())],
)
async def test_combination_of_policies_equals_generate(
    row: str, expected: Callable[[str], list[list[int]]], configure: Callable[..., Config]
) -> None:
    """Cached, thrashing, preempted, with priorities and targets, whatever the policies are."""
    combination = dict(zip(FACTORS, row.split(), strict=True))
    family = combination["family"]
    settings = [line for factor, value in combination.items() for line in FACTORS[factor][value]]
    thrashes = combination["embeddings"] == "thrashing"
    if thrashes:
        info = plugin.inspect(configure(family).model.path, dtype="auto", item_tokens_max=0)
        size = THRASHING_PAGES * PAGE_ROWS * info.embedding_row_bytes
        settings.append(f"arena.embedding_bytes={size}")
    asks = mixed_asks()
    gate = asyncio.Semaphore(CLIENTS)

    async def ask(engine: Engine, number: int) -> list[int]:
        target = 50 if number % 4 else None
        async with gate:
            stream = await begin(engine, asks[number], priority=number % 3, ttft_target_ms=target)
            return (await read(stream)).token_ids

    async with Engine(configure(family, TIGHT, *settings)) as engine, patience():
        found = await asyncio.gather(*(ask(engine, number) for number in range(len(asks))))
        await assert_idle(engine)
        counts = engine.statistics()
    assert found == expected(family)
    encode, generate = counts["encode"], counts["generate"]
    images = len({data_url(image) for ask in asks for image in ask.images})
    keeps = combination["eviction"] != "none"
    assert (encode["cache_evictions"] > 0) == (thrashes and keeps)
    assert encode["items_encoded"] >= images
    if keeps and not thrashes:
        assert encode["items_encoded"] == images, "an image was encoded again"
    assert (encode["cache_preemptions"] > 0) <= thrashes
    assert generate["preemptions"] > 0, "no request was preempted"
    assert (generate["tokens_cached"] > 0) <= (combination["prefix"] == "on")
