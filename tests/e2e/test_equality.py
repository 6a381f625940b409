"""The main claim: with any batching, chunks, caching and preemption, each client gets the tokens of `generate`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import AutoImageProcessor, AutoTokenizer

from tests.e2e.asking import Ask, choices, data_url, mixed_asks
from tests.e2e.conftest import assert_idle
from tests.workers.driver import values_of
from vsched import Config, Engine
from vsched.aio.leader import EncodeSlices
from vsched.wire import Paused
from vsched.worker.contract import view_arrays
from vsched_workers.families.qwen_image import grid_of

pytestmark = pytest.mark.asyncio(loop_scope="package")

SERVED = {
    "qwen2.5-vl": ("nano25", ()),
    "qwen3-vl-together": ("nano3", ()),
    # Five pages of embeddings for eight requests: each waits for, loses and re-encodes images.
    "qwen3-vl-no-prefix-cache": (
        "nano3",
        ("generate.attention=exact", "generate.prefix_cache=false", "arena.embedding_bytes=262144"),
    ),
}


@pytest_asyncio.fixture(
    loop_scope="package",
    params=[
        *list(SERVED)[:2],
        pytest.param("qwen3-vl-no-prefix-cache", marks=pytest.mark.thorough),
    ],
)
async def served(
    request: pytest.FixtureRequest,
    configure: Callable[..., Config],
    shared_engine: Engine,
    together_engine: Engine,
) -> AsyncIterator[Engine]:
    size, settings = SERVED[request.param]
    if not settings:
        yield shared_engine if size == "nano25" else together_engine
        return
    async with Engine(configure(size, *settings)) as engine:
        yield engine


@pytest.mark.slow
async def test_engine_equals_generate(
    served: Engine, expected: Callable[[str], list[list[int]]]
) -> None:
    """16 requests of 0 to 4 images, 8 at a time, in chunks of 48 tokens, preempted now and then."""
    before = served.statistics()["generate"]
    found = await choices(served, mixed_asks(), at_once=8)
    statistics = served.statistics()
    after, encode = statistics["generate"], statistics["encode"]
    wanted = expected(served.model_name)
    assert [each.token_ids for each in found] == wanted
    assert [each.finish_reason for each in found] == ["length"] * len(wanted)
    assert after["preemptions"] > before["preemptions"], "the KV cache was not small enough"
    cached = after["tokens_cached"] - before["tokens_cached"]
    assert (cached > 0) == served.config.generate.prefix_cache
    assert (encode["cache_evictions"] > 0) == (encode["pages_total"] < 10)
    await assert_idle(served)


@pytest.mark.slow
async def test_engine_equals_generate_if_encoding_pauses(
    configure: Callable[..., Config],
    expected: Callable[[str], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Images are encoded layer by layer between the decode steps of other requests."""
    pauses: list[Paused] = []
    plain = EncodeSlices.go_on

    def go_on(self: EncodeSlices, paused: Paused) -> int:
        pauses.append(paused)
        return plain(self, paused)

    monkeypatch.setattr(EncodeSlices, "go_on", go_on)
    sets = ("placement=together", "generate.step_target_ms=0.1", "generate.step_target_ratio=1.5")
    async with Engine(configure("nano3", *sets)) as engine:
        found = await choices(engine, mixed_asks(), at_once=8)
        assert [each.token_ids for each in found] == expected(engine.model_name)
        assert len(pauses) > len(mixed_asks())
        assert all(paused.busy_ns > 0 for paused in pauses)
        await assert_idle(engine)


async def test_answers_differ(expected: Callable[[str], list[list[int]]]) -> None:
    """Without this, equality would prove little."""
    for size in ("nano25", "nano3"):
        wanted = expected(size)
        assert len({tuple(each[:16]) for each in wanted}) == len(wanted)


async def test_preparation_equals_transformers(
    engine: Engine, checkpoints: Callable[[str], Path]
) -> None:
    """Token ids, grids and pixels in the arena equal the output of transformers' own tokenizer and image processor."""
    path = checkpoints("nano25")
    tokenizer = AutoTokenizer.from_pretrained(path)
    processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    image_token = json.loads((path / "config.json").read_text())["image_token_id"]
    asks: list[Ask] = [ask for ask in mixed_asks() if ask.images][:8]
    assert engine._running is not None
    media, arena = engine._running.media, engine._running.arena
    for ask in asks:
        urls = [data_url(image) for image in ask.images]
        prompt = engine.preprocessor.render(ask.messages)
        prepared = await media.prepare(prompt, urls)
        try:
            made = processor(list(ask.images), return_tensors="np")
            grids = [tuple(int(side) for side in grid) for grid in made["image_grid_thw"]]
            assert [grid_of(item.metadata) for item in prepared.items] == grids
            counts = iter([rows * columns // 4 for _, rows, columns in grids])
            text = tokenizer.apply_chat_template(
                ask.messages, tokenize=False, add_generation_prompt=True
            )
            wanted: list[int] = []
            for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
                wanted += [token] * (next(counts) if token == image_token else 1)
            assert list(prepared.token_ids) == wanted
            images = [
                view_arrays(item.arrays, arena.read(item.extent))
                for item in prepared.items
                if item.extent is not None
            ]
            found = values_of(images).numpy()
            assert found.tobytes() == made["pixel_values"].tobytes()
        finally:
            prepared.lease.release()
