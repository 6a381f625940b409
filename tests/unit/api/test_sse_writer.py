"""Writing deltas to a connection: at once while it accepts them, merged while it does not."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.each_case import each_case
from tests.patience import PATIENCE_S
from tests.unit.api.fakes import FakeEngine, FakeGeneration
from tests.unit.media.fakes import FakePreprocessor
from vsched.aio.streams import ChoiceInputs, OutputDelta, TokenStream
from vsched.api.checked_request import CheckedRequest, ResponseOptions
from vsched.api.choices import ChoiceStream, SseWriter
from vsched.api.formatters import ChatFormatter, CompletionFormatter
from vsched.api.http_exchange import HttpExchange
from vsched.api.metrics import ApiMetrics
from vsched.api.response_schema import ChatChunk, ChatChunkChoice, ChatDelta
from vsched.kernel.commands import Finish, RequestTimes
from vsched.types import FinishReason, SamplingParams

JOB = CheckedRequest(
    prompts=(), images=(), sampling=SamplingParams(), request_id="id", created=1, model="demo", adapter="", priority=0,
    ttft_target_ms=None, cache_salt="", session="", stream=True, options=ResponseOptions(), constrained_by="",
)  # fmt: skip


class Connection:
    """Accepts data; waits first while it is full."""

    def __init__(self, *, full: bool = False) -> None:
        self.room = asyncio.Event()
        self.texts: list[str] = []
        self.given_up = 0
        if not full:
            self.room.set()

    async def send(self, message: Any) -> None:
        try:
            await self.room.wait()
            await asyncio.sleep(0) if not self.texts else None
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        content = msgspec.json.decode(message["body"].removeprefix(b"data: "))
        self.texts.append(content["choices"][0]["delta"].get("content", ""))

    def relay(self, generation: Any) -> SseWriter:
        async def receive() -> Any:
            raise AssertionError("a relay reads nothing")

        exchange = HttpExchange({"type": "http"}, receive, self.send)
        writer = ChatFormatter(generation, JOB, FakePreprocessor())
        record = ApiMetrics(FakeEngine()).begin("chat")
        return SseWriter(exchange, record, [ChoiceStream(generation, writer)])


class Letters:
    """Every token is a letter."""

    def push(self, token_ids: Any) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""


def live_generation() -> TokenStream:
    return TokenStream(
        ChoiceInputs(
            request_id="id",
            prompt_token_ids=[1],
            on_stop=lambda *_: None,
            on_end=lambda: None,
        ),
        lambda **_: Letters(),
    )


def push(generation: TokenStream, letters: str) -> None:
    for letter in letters:
        generation.push(ord(letter), None)
        generation.deliver()


async def test_sse_writer_writes_from_within_the_call_that_brings_news() -> None:
    connection, generation = Connection(), live_generation()
    task = asyncio.ensure_future(connection.relay(generation).run())
    push(generation, "a")
    for _ in range(5):
        await asyncio.sleep(0)
    push(generation, "bc")
    assert connection.texts == ["a", "b", "c"], "no turn of the loop was needed"
    generation.finish(Finish("id", 1, FinishReason.LENGTH, RequestTimes()))
    generation.deliver()
    assert await task == "length"


async def test_sse_writer_deltas_grow_together_while_the_connection_is_full() -> None:
    connection, generation = Connection(full=True), live_generation()
    task = asyncio.ensure_future(connection.relay(generation).run())
    await asyncio.sleep(0)
    push(generation, "abcd")
    await asyncio.sleep(0)
    assert connection.texts == []
    connection.room.set()
    generation.finish(Finish("id", 1, FinishReason.STOP, RequestTimes()))
    generation.deliver()
    assert await asyncio.wait_for(task, PATIENCE_S) == "stop"
    assert connection.texts == ["a", "bcd"]


async def test_sse_writer_cancelled_while_it_waits_cancels_what_it_sends() -> None:
    connection = Connection(full=True)
    generation = FakeGeneration([OutputDelta("a", [1])], "id")
    task = asyncio.ensure_future(connection.relay(generation).run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert connection.given_up == 1


@each_case("text", ["plain", 'a "quote"', "ümlaut\n", "\x00", "\u2028", "}\\"])
def test_writer_text_alone_is_encoded_as_ever(text: str) -> None:
    """A chunk of text and nothing else is assembled from parts that were encoded before."""
    encode = msgspec.json.Encoder().encode
    delta = OutputDelta(text, [1])
    generation = FakeGeneration([], "id")
    writer = ChatFormatter(generation, JOB, FakePreprocessor())
    writer.chunk(OutputDelta("first", [1]))
    choice = ChatChunkChoice(ChatDelta(content=text), None, None)
    assert encode(writer.chunk(delta)) == encode(ChatChunk("id", 1, "demo", [choice]))
    plain = CompletionFormatter(generation, JOB, FakePreprocessor())
    whole = plain.chunk(OutputDelta(text, [1], finish_reason="stop"))
    expected = encode(whole).replace(b'"finish_reason":"stop"', b'"finish_reason":null')
    assert encode(plain.chunk(delta)) == expected
