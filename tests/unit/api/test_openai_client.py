"""Response bodies as parsed by the openai client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.api.fakes import FakeEngine
from tests.unit.api.test_resuming import Server, choice_id, ids
from vsched.aio.streams import OutputDelta, TokenLogprob
from vsched.api import ApiSettings, create_app
from vsched.errors import RequestFailed

if TYPE_CHECKING:
    import httpx2
    import openai
else:
    openai = pytest.importorskip("openai")
    httpx2 = pytest.importorskip("httpx2")

pytestmark = pytest.mark.slow


@pytest.fixture
def engine() -> FakeEngine:
    first = TokenLogprob(72, -0.5, [(72, -0.5), (73, -2.0)])
    return FakeEngine(
        OutputDelta("H", [72], [first]),
        OutputDelta("i", [105], [TokenLogprob(105, -1.0, [])], "stop"),
    )


@contextlib.asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[Any]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as inner:
        yield openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="key", http_client=inner, max_retries=0
        )


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[Any]:
    async with client_of(create_app(engine, ApiSettings(api_key="key"))) as made:
        yield made


MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def test_chat_parses(client: Any) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == "Hi"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].top_logprobs[1].token == "I"
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    again = [*MESSAGES, answer.choices[0].message.model_dump(), *MESSAGES]
    assert (await client.chat.completions.create(model="demo", messages=again)).id


async def test_responses_parse(client: Any) -> None:
    """Streaming and not, and the output is valid input."""
    async with client.responses.stream(model="demo", input="hi") as stream:
        deltas = [event.delta async for event in stream if event.type.endswith("text.delta")]
        final = await stream.get_final_response()
    assert (deltas, final.output_text, final.status) == (["H", "i"], "Hi", "completed")
    history = [*MESSAGES, *final.output, *MESSAGES]
    again = await client.responses.create(model="demo", input=history)
    assert again.output_text == "Hi"
    assert again.usage.input_tokens_details.cached_tokens == 4


async def test_errors_become_the_clients_errors(client: Any, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="demo", messages=MESSAGES, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=MESSAGES)
    engine.script = (OutputDelta("H", [72]), RequestFailed("the encoder failed"))
    stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the encoder failed"):
        async for _ in stream:
            pass


async def test_models_parse(client: Any) -> None:
    assert [model.id async for model in client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).owned_by == "vsched"


async def test_stream_of_a_dead_engine_is_read_on_behind_its_last_event(tmp_path: Path) -> None:
    started = await Server(tmp_path).killed_in("/v1/responses", {"input": "hi", "stream": True})
    second = await Server(tmp_path).start()
    name, last = choice_id(started), ids(started)[-1]
    async with client_of(second.app) as client:
        stream = await client.responses.retrieve(name, stream=True, starting_after=last)
        numbers = [event.sequence_number async for event in stream]
        assert numbers == list(range(last + 1, last + 1 + len(numbers)))
        assert len(numbers) > 3
        for _ in range(2):
            whole = await client.responses.retrieve(name, stream=False)
            assert (whole.output_text, whole.id) == ("Hello!", name)
