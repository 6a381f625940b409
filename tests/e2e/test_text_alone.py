"""An engine without encode ranks: text is served as usual, and nothing mentions images."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.e2e.asking import choices, mixed_asks
from vsched import Config, Engine

VISION_WORDS = re.compile("image|vision|encod|pixel|arena", re.IGNORECASE)


@pytest.mark.asyncio(loop_scope="package")
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
