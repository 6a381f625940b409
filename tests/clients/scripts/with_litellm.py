"""litellm: chat with and without streaming, tools, structured output, and its errors."""

from __future__ import annotations

import json
from typing import Any

import litellm

from tests.clients import asked


def ask(messages: list[Any], **options: Any) -> Any:
    given = {"model": f"openai/{asked.MODEL}", "api_base": asked.URL, "temperature": 0}
    return litellm.completion(
        **{**given, "api_key": "none", "messages": messages, "max_tokens": 100, **options}
    )


def check_chat() -> None:
    assert "Paris" in ask(asked.user(asked.CAPITAL)).choices[0].message.content


def check_stream() -> None:
    chunks = ask(asked.user(asked.CAPITAL), stream=True, stream_options={"include_usage": True})
    assert "Paris" in "".join(
        chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
    )


def check_text_completion() -> None:
    reply = litellm.text_completion(
        model=f"text-completion-openai/{asked.MODEL}",
        api_base=asked.URL,
        api_key="none",
        prompt="Once upon",
        max_tokens=5,
    )
    assert reply.choices[0].text


def check_tools() -> None:
    reply = ask(asked.user(asked.WEATHER), tools=[asked.TOOL], tool_choice=asked.NAMED)
    (call,) = reply.choices[0].message.tool_calls
    asked.check_weather(json.loads(call.function.arguments))


def check_structured_output() -> None:
    schema = {"name": "weather", "schema": asked.PARAMETERS, "strict": True}
    reply = ask(
        asked.user(asked.WEATHER), response_format={"type": "json_schema", "json_schema": schema}
    )
    asked.check_weather(json.loads(reply.choices[0].message.content))


def check_images() -> None:
    reply = ask(
        asked.about_picture(), model=f"openai/{asked.VISION_MODEL}", api_base=asked.VISION_URL
    )
    asked.check_picture(reply.choices[0].message.content)


def check_context_window_exceeded() -> None:
    try:
        ask(asked.user(asked.TOO_LONG))
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt beyond the context was taken")


def check_anthropic() -> None:
    reply = litellm.completion(
        model=f"anthropic/{asked.MODEL}",
        api_base=asked.URL.removesuffix("/v1"),
        api_key="none",
        messages=asked.user(asked.CAPITAL),
        temperature=0,
        max_tokens=30,
    )
    assert "Paris" in reply.choices[0].message.content
