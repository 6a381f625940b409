"""An engine without encode ranks: text is served as usual, and nothing mentions images."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import pytest_asyncio

from tests.e2e.asking import Ask, choices, mixed_asks
from vsched import Config, Engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = "nano25"
VISION_WORDS = re.compile("image|vision|encod|pixel|arena", re.IGNORECASE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def text_engine(configure: Callable[..., Config]) -> AsyncIterator[Engine]:
    """A vision checkpoint, served for text alone."""
    async with Engine(configure(SIZE, "encode.replicas=0")) as engine:
        yield engine


async def test_answers_are_those_of_generate(
    text_engine: Engine, generated: Callable[[str, Sequence[Ask]], list[list[int]]]
) -> None:
    asks = [ask for ask in mixed_asks() if not ask.images]
    assert len(asks) > 3
    found = await choices(text_engine, asks, at_once=3)
    assert [one.token_ids for one in found] == generated(SIZE, asks)


async def test_nothing_is_there_for_images(
    text_engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """One process, one group, no shared memory, no line of the ledger, and no word in the log."""
    assert [group["name"] for group in text_engine.groups()] == ["generate"]
    assert len(text_engine.rank_pids) == 1
    statistics = text_engine.statistics()
    assert statistics["memory"]["arena_pixels"] == statistics["memory"]["arena_embeddings"] == 0
    assert text_engine.ledger is not None
    assert not VISION_WORDS.search(text_engine.ledger.render() + text_engine.ledger.render_phases())
    assert not VISION_WORDS.search(caplog.text)
