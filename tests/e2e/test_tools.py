"""Tool calls: forced ones keep to their schemas, streaming or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="package")

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 3, "maxLength": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "weather"}}
MESSAGES = [{"role": "user", "content": "Rain?"}]


def check_weather(arguments: str) -> None:
    found = json.loads(arguments)
    assert list(found) == ["city", "unit"]
    assert 3 <= len(found["city"]) <= 9
    assert found["unit"] in {"C", "F"}


async def chat(client: Any, **options: Any) -> Any:
    requested = {"model": "nano25", "messages": MESSAGES, "tools": [WEATHER], "max_tokens": 150}
    return await client.chat.completions.create(**{**requested, "seed": 3, **options})


async def test_a_named_function_is_called_with_arguments_that_fit(sdk: Any) -> None:
    replies = await asyncio.gather(
        *(chat(sdk, tool_choice=NAMED, seed=seed, temperature=1.2) for seed in range(2))
    )
    for reply in replies:
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        check_weather(call.function.arguments)
    calls = [reply.choices[0].message.tool_calls[0] for reply in replies]
    assert len({call.id for call in calls}) == len({call.function.arguments for call in calls}) == 2


async def test_stream_of_a_required_call_equals_the_response(sdk: Any) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    whole = (await chat(sdk, **options)).choices[0].message.tool_calls[0].function
    chunks = [chunk async for chunk in await chat(sdk, stream=True, **options)]
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == whole.name == "weather"
    assert deltas[0].id
    assert len(deltas) > 1, "arguments come as they are generated"
    assert "".join(delta.function.arguments for delta in deltas) == whole.arguments
    check_weather(whole.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
