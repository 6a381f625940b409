"""The main claim: with any batching, chunks, caching and preemption, each client gets the tokens of `generate`."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.e2e.asking import choices, mixed_asks
from tests.e2e.conftest import assert_idle
from vsched import Config, Engine

pytestmark = pytest.mark.asyncio(loop_scope="package")

VISION_WORDS = re.compile("image|vision|encod|pixel|arena", re.IGNORECASE)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["nano25", pytest.param("nano3", marks=pytest.mark.thorough)])
async def test_engine_equals_generate(
    size: str,
    shared_engine: Engine,
    together_engine: Engine,
    expected: Callable[[str], list[list[int]]],
) -> None:
    """16 requests of 0 to 4 images, 8 at a time, in chunks of 48 tokens, preempted now and then."""
    engine = shared_engine if size == "nano25" else together_engine
    before = engine.statistics()["generate"]
    found = await choices(engine, mixed_asks(), at_once=8)
    after = engine.statistics()["generate"]
    wanted = expected(size)
    assert len({tuple(each[:16]) for each in wanted}) == len(wanted), "equality proves nothing"
    assert [each.token_ids for each in found] == wanted
    assert [each.finish_reason for each in found] == ["length"] * len(wanted)
    assert after["preemptions"] > before["preemptions"], "the KV cache was not small enough"
    assert after["tokens_cached"] > before["tokens_cached"]
    await assert_idle(engine)


async def test_vision_checkpoint_is_served_for_text_alone(
    configure: Callable[..., Config],
    expected: Callable[[str], list[list[int]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One process, one group, no shared memory, no line of the ledger, and no word in the log."""
    asked = mixed_asks()
    texts = [number for number, ask in enumerate(asked) if not ask.images]
    assert len(texts) > 3
    async with Engine(configure("nano25", "encode.replicas=0")) as engine:
        found = await choices(engine, [asked[number] for number in texts], at_once=3)
        assert [one.token_ids for one in found] == [expected("nano25")[number] for number in texts]
        assert [group["name"] for group in engine.groups()] == ["generate"]
        assert len(engine.rank_pids) == 1
        memory = engine.statistics()["memory"]
        assert memory["arena_pixels"] == memory["arena_embeddings"] == 0
        assert engine.ledger is not None
        assert not VISION_WORDS.search(engine.ledger.render() + engine.ledger.render_phases())
    assert not VISION_WORDS.search(caplog.text)
