"""OpenAI's own client for Python."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

from tests.clients import asked

client = openai.OpenAI(base_url=asked.URL, api_key="none", max_retries=0)
vision = openai.OpenAI(base_url=asked.VISION_URL, api_key="none", max_retries=0)


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)
    size: Literal["small", "large"]


GREEDY: dict[str, Any] = {"model": asked.MODEL, "temperature": 0}
DESCRIBE = "Describe Paris as JSON."


def ask(text: str, **options: Any) -> Any:
    return client.chat.completions.create(**GREEDY, messages=asked.user(text), **options)


def check_chat() -> None:
    reply = ask(asked.CAPITAL, max_tokens=30)
    assert "Paris" in str(reply.choices[0].message.content)
    assert reply.usage
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def check_stream() -> None:
    options = {"include_usage": True}
    chunks = list(ask(asked.CAPITAL, max_tokens=30, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage


def check_completion() -> None:
    reply = client.completions.create(
        model=asked.MODEL, prompt="Once upon", max_tokens=5, n=2, seed=1, logprobs=0, echo=True
    )
    assert [choice.text.startswith("Once upon") for choice in reply.choices] == [True, True]


async def check_async() -> None:
    async with openai.AsyncOpenAI(base_url=asked.URL, api_key="none") as other:
        reply = await other.chat.completions.create(
            model=asked.MODEL, messages=asked.user("Hi"), max_tokens=5
        )
    assert reply.choices[0].finish_reason in {"length", "stop"}


def check_parse() -> None:
    reply = client.chat.completions.parse(
        **GREEDY, messages=asked.user(DESCRIBE), response_format=City, max_tokens=200
    )
    assert isinstance(reply.choices[0].message.parsed, City)


def check_tools() -> None:
    tools: dict[str, Any] = {"tools": [asked.TOOL], "tool_choice": asked.NAMED, "max_tokens": 100}
    messages = asked.user(asked.WEATHER)
    with client.chat.completions.stream(**GREEDY, messages=messages, **tools) as stream:
        reply = stream.get_final_completion()
    (call,) = reply.choices[0].message.tool_calls or []
    asked.check_weather(json.loads(call.function.arguments))


def check_responses() -> None:
    limits: dict[str, Any] = {"max_output_tokens": 30, "store": False}
    assert "Paris" in client.responses.create(**GREEDY, input=asked.CAPITAL, **limits).output_text


def check_responses_parse() -> None:
    limits: dict[str, Any] = {"max_output_tokens": 200, "store": False}
    with client.responses.stream(**GREEDY, input=DESCRIBE, text_format=City, **limits) as stream:
        reply = stream.get_final_response()
    assert isinstance(reply.output_parsed, City)


def check_images() -> None:
    reply = vision.chat.completions.create(
        model=asked.VISION_MODEL, messages=asked.about_picture(), temperature=0, max_tokens=10
    )
    asked.check_picture(reply.choices[0].message.content)


def check_models() -> None:
    assert [model.id for model in client.models.list()] == [asked.MODEL]


def check_errors() -> None:
    try:
        ask(asked.TOO_LONG)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"  # noqa: PT017
        assert error.request_id  # noqa: PT017
    else:
        raise AssertionError("a prompt beyond the context was taken")
