"""Responses of Anthropic's API: streaming and non-streaming ones agree, and errors have its shape."""

from __future__ import annotations

import json
from typing import Any

from tests.each_case import each_case
from tests.unit.api.compat.scripts import CALLS, named_events, saying
from tests.unit.api.fakes import FakeEngine, post
from vsched.aio.streams import OutputDelta
from vsched.api import ApiSettings
from vsched.errors import RequestFailed, RequestRefused

MESSAGES = "/v1/messages"
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "demo", "max_tokens": 9, "messages": messages, **fields}


def merged(events: list[Any]) -> dict[str, Any]:
    """Return the message that a client assembles from a stream, checking the order of its events."""
    assert events[0]["type"] == "message_start"
    assert events[-1] == {"type": "message_stop"}
    message: dict[str, Any] = events[0]["message"]
    assert (message["content"], message["usage"]["output_tokens"]) == ([], 0)
    texts: list[str] = []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                texts.append("")
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(texts) - 1
                (text,) = [value for key, value in event["delta"].items() if key != "type"]
                assert text
                texts[-1] += text
            case _:
                assert event == {"type": "content_block_stop", "index": len(texts) - 1}
                is_open = False
    assert not is_open
    for block, text in zip(message["content"], texts, strict=True):
        match block["type"]:
            case "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(text or "{}")
            case kind:
                assert block[kind] == ""
                block[kind] = text
    assert events[-2]["type"] == "message_delta"
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    assert message.pop("id").startswith("msg-")
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id")
    return message


@each_case("stream", [False, True])
@each_case("size", [1, 7, 500])
async def test_text_and_calls(size: int, *, stream: bool) -> None:
    reply = await post(saying(CALLS, size=size), MESSAGES, body(tools=TOOLS, stream=stream))
    message = without_ids(merged(named_events(reply)) if stream else reply.json)
    tokens = -(-len(CALLS) // size) + 1
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [
            {"type": "text", "text": "Look."},
            {"type": "tool_use", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "name": "f", "input": {"b": "ü"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_read_input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "output_tokens": tokens,
        },
    }


@each_case("stream", [False, True])
async def test_thoughts_come_first(*, stream: bool) -> None:
    settings = ApiSettings(reasoning_format="think")
    engine = saying("<think>hm</think>yes", size=3)
    reply = await post(engine, MESSAGES, body(stream=stream), settings)
    message = merged(named_events(reply)) if stream else reply.json
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "yes"},
    ]


@each_case("stream", [False, True])
@each_case(
    ("finish", "stop", "reason"),
    [
        ("stop", None, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
    ],
)
async def test_ends(finish: str, stop: str | None, reason: str, *, stream: bool) -> None:
    engine = saying("", finish, stop_string=stop)
    reply = await post(engine, MESSAGES, body(stream=stream))
    message = merged(named_events(reply)) if stream else reply.json
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    assert message["content"] == [{"type": "text", "text": ""}], "clients look at the first block"


async def test_arguments_that_were_cut_are_kept() -> None:
    engine = saying('<tool_call>\n{"name": "f", "arguments": {"a": [1', "length")
    (block,) = (await post(engine, MESSAGES, body(tools=TOOLS))).json["content"]
    assert block["input"] == {"INVALID_JSON": '{"a": [1'}


@each_case(
    ("error", "status", "kind"),
    [
        (RequestRefused("no", code="x"), 400, "invalid_request_error"),
        (RequestRefused("no", code="x", status=413), 413, "request_too_large"),
        (RequestRefused("no", code="queue_full", status=429), 429, "rate_limit_error"),
        (RequestRefused("no", code="x", status=503, retry_after_s=5), 529, "overloaded_error"),
        (RequestFailed("no"), 500, "api_error"),
        (ValueError("a bug"), 500, "api_error"),
    ],
)
async def test_errors_have_anthropics_shape(error: Exception, status: int, kind: str) -> None:
    engine = FakeEngine()
    engine.refusal = error
    reply = await post(engine, MESSAGES, body())
    assert reply.status == status
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == kind
    assert set(reply.json["error"]) == {"type", "message"}


async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    engine = FakeEngine(OutputDelta("a", [1]), RequestFailed("lost", code="group_lost"))
    reply = await post(engine, MESSAGES, body(stream=True))
    *_, last = named_events(reply)
    assert last == {"type": "error", "error": {"type": "api_error", "message": "lost"}}
