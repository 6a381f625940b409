"""Other vendors' APIs with real ranks: the same outputs as in chats, in their own events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

from tests.e2e.asking import TEXTS, Ask, answer, drawn_image, held  # noqa: E402
from tests.patience import until  # noqa: E402
from vsched import Engine  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="package")

# Long enough that its tokens cannot all wait together for a delayed event loop.
ASK = Ask(TEXTS[1], [drawn_image(6000, (112, 84))], count=200)
OPTIONS: dict[str, Any] = {"model": "nano25", "temperature": 0.0, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


async def events_of(client: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200
        lines = [line async for line in reply.aiter_lines()]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


async def leave(client: Any, path: str, body: dict[str, Any]) -> None:
    """Read the first events of a stream, and disconnect."""
    async with client.stream("POST", path, json=body | {"stream": True}) as reply:
        async for line in reply.aiter_lines():
            if "delta" in line:
                return


def anthropic_messages(ask: Ask) -> list[dict[str, Any]]:
    """Return the messages of a chat in Anthropic's format."""
    made: list[dict[str, Any]] = []
    for message in ask.messages:
        content: list[dict[str, Any]] = []
        for part in message["content"]:
            if part["type"] == "text":
                content.append(part)
                continue
            head, data = part["image_url"]["url"].split(",")
            media_type = head.removeprefix("data:").removesuffix(";base64")
            source = {"type": "base64", "media_type": media_type, "data": data}
            content.append({"type": "image", "source": source})
        made.append({"role": message["role"], "content": content})
    return made


async def test_messages_answer_as_the_chat_does(client: Any, engine: Engine) -> None:
    wanted = await answer(engine, ASK)
    body = OPTIONS | {"messages": anthropic_messages(ASK), "max_tokens": ASK.count}
    message = (await client.post("/v1/messages", json=body)).json()
    assert message["content"] == [{"type": "text", "text": wanted.text}]
    assert message["stop_reason"] == "max_tokens"
    usage = message["usage"]
    assert usage["output_tokens"] == ASK.count
    prompt = len(ASK.prompt(engine.preprocessor))
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
    assert counted == {"input_tokens": prompt}
    events = await events_of(client, "/v1/messages", body)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert len(deltas) > 1, "text comes as it is generated"
    assert "".join(delta["text"] for delta in deltas) == wanted.text
    stop = wanted.text[5:9]
    stopped = (await client.post("/v1/messages", json=body | {"stop_sequences": [stop]})).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][0]["text"] == wanted.text[: wanted.text.index(stop)]


async def test_messages_with_tools_are_counted_as_they_are_used(client: Any) -> None:
    body: dict[str, Any] = {"model": "nano25", "messages": [{"role": "user", "content": "Rain?"}]}
    body["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
    counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
    body |= {"max_tokens": 80, "seed": 3, "tool_choice": {"type": "tool", "name": "weather"}}
    message = (await client.post("/v1/messages", json=body)).json()
    (call,) = message["content"]
    assert (call["name"], message["stop_reason"]) == ("weather", "tool_use")
    assert call["input"]["unit"] in {"C", "F"}
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]


def response_input(ask: Ask) -> list[dict[str, Any]]:
    """Return the messages of a chat as input of /v1/responses."""
    made: list[dict[str, Any]] = []
    for message in ask.messages:
        content = [
            {"type": "input_text", "text": part["text"]}
            if part["type"] == "text"
            else {"type": "input_image", "image_url": part["image_url"]["url"]}
            for part in message["content"]
        ]
        made.append({"role": message["role"], "content": content})
    return made


async def test_responses_answer_as_the_chat_does(client: Any, engine: Engine) -> None:
    wanted = await answer(engine, ASK)
    body = OPTIONS | {"input": response_input(ASK), "max_output_tokens": ASK.count}
    response = (await client.post("/v1/responses", json=body)).json()
    assert [item["content"][0]["text"] for item in response["output"]] == [wanted.text]
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", ASK.count)
    assert response["usage"]["input_tokens"] == len(ASK.prompt(engine.preprocessor))
    events = await events_of(client, "/v1/responses", body)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 1, "text comes as it is generated"
    assert "".join(deltas) == wanted.text
    assert events[-1]["type"] == "response.incomplete"


async def test_streams_whose_clients_leave_hold_nothing(client: Any, engine: Engine) -> None:
    body = OPTIONS | {"messages": anthropic_messages(ASK), "max_tokens": 500}
    requested = OPTIONS | {"input": response_input(ASK), "max_output_tokens": 500}
    await asyncio.gather(
        leave(client, "/v1/messages", body),
        leave(client, "/v1/messages", body),
        leave(client, "/v1/responses", requested),
    )
    await until(lambda: not any(held(engine).values()), "unread responses are aborted")
