"""pydantic-ai: typed output in three modes, tools, streams, images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, BinaryContent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients import asked

model = OpenAIChatModel(asked.MODEL, provider=OpenAIProvider(base_url=asked.URL, api_key="none"))
settings: Any = {"temperature": 0, "max_tokens": 200}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    size: Literal["small", "large"]


def describe(output: Any) -> None:
    agent = Agent(model, output_type=output, model_settings=settings)
    assert isinstance(agent.run_sync("Describe Paris: its name and its size.").output, City)


def check_text() -> None:
    agent = Agent(model, model_settings=settings)
    assert "Paris" in agent.run_sync(asked.CAPITAL).output


def check_typed_by_tool() -> None:
    describe(ToolOutput(City))


def check_typed_natively() -> None:
    describe(NativeOutput(City))


def check_typed_by_prompt() -> None:
    describe(PromptedOutput(City))


def check_tools() -> None:
    """Its tools are never forced, and so small a model may not call one, but it must reply."""
    agent = Agent(model, model_settings=settings)
    agent.tool_plain(get_weather)
    assert agent.run_sync(asked.WEATHER).output


def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """Tell the weather of a city."""
    return f"18 degrees {unit} in {city}"


async def check_stream() -> None:
    agent = Agent(model, model_settings=settings)
    async with agent.run_stream(asked.CAPITAL) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    assert "Paris" in "".join(pieces)


def check_images() -> None:
    vision = OpenAIChatModel(
        asked.VISION_MODEL, provider=OpenAIProvider(base_url=asked.VISION_URL, api_key="none")
    )
    picture = BinaryContent(Path(asked.PICTURE).read_bytes(), media_type="image/png")
    agent = Agent(vision, model_settings={"temperature": 0})
    asked.check_picture(agent.run_sync([picture, asked.PICTURE_QUESTION]).output)
