"""Anthropic's own client: messages, streams, images, tools and their runner, models, counts, and errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic

from tests.clients import asked

ROOT = asked.URL.removesuffix("/v1")
CLIENT = anthropic.Anthropic(base_url=ROOT, api_key="none", max_retries=0)
GIVEN: dict[str, Any] = {"model": asked.MODEL, "max_tokens": 100, "extra_body": {"temperature": 0}}
TOOL = {
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "input_schema": asked.PARAMETERS,
}


def check_messages() -> None:
    reply = CLIENT.messages.create(**GIVEN, messages=asked.user(asked.CAPITAL))
    assert "Paris" in reply.content[0].text
    assert reply.stop_reason == "end_turn"


def check_stream() -> None:
    with CLIENT.messages.stream(**GIVEN, messages=asked.user(asked.CAPITAL)) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text
    assert "Paris" in text


def check_tools() -> None:
    choice = {"type": "tool", "name": "get_weather"}
    reply = CLIENT.messages.create(
        **GIVEN, messages=asked.user(asked.WEATHER), tools=[TOOL], tool_choice=choice
    )
    asked.check_weather(reply.content[0].input)
    assert reply.stop_reason == "tool_use"


def check_tool_runner() -> None:
    run_tools(stream=False)


def check_tool_runner_streamed() -> None:
    run_tools(stream=True)


def run_tools(*, stream: bool) -> None:
    """By default, with the thread that the client requests."""
    called: list[str] = []

    @anthropic.beta_tool(input_schema=asked.PARAMETERS)
    def get_weather(city: str, unit: str) -> str:
        """Tell the weather of a city."""
        called.append(city)
        return f"20 degrees {unit}"

    runner = CLIENT.beta.messages.tool_runner(
        **GIVEN,
        messages=asked.user(asked.WEATHER),
        tools=[get_weather],
        tool_choice={"type": "any"},
        max_iterations=2,
        stream=stream,
    )
    assert len(list(runner)) == 2
    assert called


def check_images() -> None:
    client = anthropic.Anthropic(base_url=asked.VISION_URL.removesuffix("/v1"), api_key="none")
    data = asked.PICTURE_URL.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [
        {"type": "image", "source": source},
        {"type": "text", "text": asked.PICTURE_QUESTION},
    ]
    reply = client.messages.create(
        **{**GIVEN, "model": asked.VISION_MODEL}, messages=[{"role": "user", "content": content}]
    )
    asked.check_picture(reply.content[0].text)


def check_models() -> None:
    (model,) = CLIENT.models.list()
    assert (model.id, model.display_name) == (asked.MODEL, asked.MODEL)
    assert model.created_at.tzinfo is not None
    assert CLIENT.models.retrieve(asked.MODEL) == model


def check_count() -> None:
    messages = asked.user(asked.CAPITAL)
    counted = CLIENT.messages.count_tokens(model=asked.MODEL, messages=messages)
    used = CLIENT.messages.create(**GIVEN, messages=messages).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def check_errors() -> None:
    asks: dict[str, Callable[[], object]] = {
        "not served here": partial(
            CLIENT.messages.create, **{**GIVEN, "model": "claude"}, messages=asked.user("x")
        ),
        "is not served (batches)": CLIENT.messages.batches.list,
        "Remedy": partial(CLIENT.messages.create, **GIVEN, messages=asked.user(asked.TOO_LONG)),
    }
    for wanted, ask in asks.items():
        message = ""
        try:
            ask()
        except anthropic.APIStatusError as error:
            message = error.message
        assert wanted in message, message or "no error"
