"""langchain-openai: chat, streams, batches, tools, structured output."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.clients import asked


def model(**options: Any) -> ChatOpenAI:
    given = {"model": asked.MODEL, "base_url": asked.URL, "api_key": "none", "temperature": 0}
    return ChatOpenAI(**{**given, "max_tokens": 200, **options})


chat = model()


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    size: Literal["small", "large"]


@tool
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """Tell the weather of a city."""
    return f"18 degrees {unit} in {city}"


def check_invoke() -> None:
    reply = chat.invoke(asked.CAPITAL)
    assert "Paris" in reply.content
    assert reply.usage_metadata["output_tokens"] > 0


def check_stream() -> None:
    chunks = list(chat.stream(asked.CAPITAL))
    assert "Paris" in "".join(chunk.content for chunk in chunks)


def check_batch() -> None:
    replies = chat.batch([asked.CAPITAL, "Count from 1 to 5.", asked.CAPITAL])
    assert replies[0].content == replies[2].content != replies[1].content


def check_tools() -> None:
    bound = chat.bind_tools([get_weather], tool_choice="get_weather")
    messages: list[Any] = [HumanMessage(asked.WEATHER)]
    called = bound.invoke(messages)
    (call,) = called.tool_calls
    asked.check_weather(call["args"])
    messages += [called, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert chat.invoke(messages).content


def check_structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        typed = chat.with_structured_output(City, method=method)
        assert isinstance(typed.invoke("Describe Paris: its name and its size."), City), method


def check_responses_api() -> None:
    other = model(use_responses_api=True, store=False, max_tokens=30)
    assert "Paris" in other.invoke(asked.CAPITAL).text


def check_images() -> None:
    vision = model(model=asked.VISION_MODEL, base_url=asked.VISION_URL)
    asked.check_picture(vision.invoke(asked.about_picture()).content)
