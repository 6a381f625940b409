"""A server without encode ranks: text is served as usual, images are refused, and nothing mentions them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio

httpx = pytest.importorskip("httpx")

from tests.e2e.asking import TEXTS, Ask, choices, drawn_image, mixed_asks  # noqa: E402
from tests.patience import PATIENCE_S  # noqa: E402
from vsched import Config  # noqa: E402
from vsched.api.server import RunningServer, running_server  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = "nano25"
VISION_WORDS = re.compile("image|vision|encod|pixel|arena", re.IGNORECASE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def text_server(configure: Callable[..., Config]) -> AsyncIterator[RunningServer]:
    """A vision checkpoint, served for text alone."""
    async with running_server(configure(SIZE, "encode.replicas=0")) as running:
        yield running


async def test_answers_are_those_of_generate(
    text_server: RunningServer, generated: Callable[[str, Sequence[Ask]], list[list[int]]]
) -> None:
    asks = [ask for ask in mixed_asks() if not ask.images]
    assert len(asks) > 3
    found = await choices(text_server.engine, asks, at_once=3)
    assert [one.token_ids for one in found] == generated(SIZE, asks)


async def test_a_request_with_an_image_gets_a_400(text_server: RunningServer) -> None:
    body = {"model": SIZE, "messages": Ask(TEXTS[0], [drawn_image(1)]).messages, "max_tokens": 4}
    async with httpx.AsyncClient(base_url=text_server.url, timeout=PATIENCE_S) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == "images_not_taken"
    assert error["message"].startswith("the model takes no images. Remedy: send text alone")


async def test_nothing_is_there_for_images(
    text_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One process, one group, no shared memory, no line of the ledger, and no word in the log."""
    engine = text_server.engine
    assert [group["name"] for group in engine.groups()] == ["generate"]
    assert len(engine.rank_pids) == 1
    statistics = engine.statistics()
    assert statistics["memory"]["arena_pixels"] == statistics["memory"]["arena_embeddings"] == 0
    assert engine.ledger is not None
    assert not VISION_WORDS.search(engine.ledger.render() + engine.ledger.render_phases())
    assert not VISION_WORDS.search(caplog.text)
