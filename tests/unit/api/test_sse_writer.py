"""Writing deltas to a connection: at once while it accepts them, merged while it does not."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from tests.patience import PATIENCE_S, until
from tests.unit.api.fakes import FakeEngine
from tests.unit.media.fakes import FakeDetokenizer, FakePreprocessor
from vsched.aio.streams import ChoiceInputs, TokenStream
from vsched.api.checked_request import CheckedRequest, ResponseOptions
from vsched.api.choices import ChoiceStream, SseWriter
from vsched.api.formatters import ChatFormatter
from vsched.api.http_exchange import HttpExchange
from vsched.api.metrics import ApiMetrics
from vsched.kernel.commands import Finish, RequestTimes
from vsched.types import FinishReason, SamplingParams

JOB = CheckedRequest(
    prompts=(), images=(), sampling=SamplingParams(), request_id="id", created=1, model="demo", adapter="", priority=0,
    ttft_target_ms=None, cache_salt="", session="", stream=True, options=ResponseOptions(), constrained_by="",
)  # fmt: skip


class Connection:
    """Accepts data once it has room."""

    def __init__(self) -> None:
        self.room = asyncio.Event()
        self.texts: list[str] = []

    async def send(self, message: Any) -> None:
        await self.room.wait()
        content = msgspec.json.decode(message["body"].removeprefix(b"data: "))
        self.texts.append(content["choices"][0]["delta"].get("content", ""))

    def relay(self, generation: Any) -> SseWriter:
        async def receive() -> Any:
            raise AssertionError("a relay reads nothing")

        exchange = HttpExchange({"type": "http"}, receive, self.send)
        writer = ChatFormatter(generation, JOB, FakePreprocessor())
        record = ApiMetrics(FakeEngine()).begin("chat")
        return SseWriter(exchange, record, [ChoiceStream(generation, writer)])


async def test_sse_writer_deltas_grow_together_while_the_connection_is_full() -> None:
    """They are written at once while it accepts them."""
    connection = Connection()
    inputs = ChoiceInputs(
        request_id="id", prompt_token_ids=[1], on_stop=lambda *_: None, on_end=lambda: None
    )
    generation = TokenStream(inputs, lambda **_: FakeDetokenizer())
    task = asyncio.ensure_future(connection.relay(generation).run())
    await asyncio.sleep(0)

    def push(letters: str) -> None:
        for letter in letters:
            generation.push(ord(letter), None)
            generation.deliver()

    push("abcd")
    await asyncio.sleep(0)
    assert connection.texts == []
    connection.room.set()
    await until(lambda: connection.texts == ["a", "bcd"])
    push("ef")
    assert connection.texts[2:] == ["e", "f"], "no turn of the loop was needed"
    generation.finish(Finish("id", 1, FinishReason.STOP, RequestTimes()))
    generation.deliver()
    assert await asyncio.wait_for(task, PATIENCE_S) == "stop"
