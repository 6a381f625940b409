"""OpenAI's responses: order of events; streaming and non-streaming ones agree."""

from __future__ import annotations

import math
from typing import Any

from tests.each_case import each_case
from tests.unit.api.compat.scripts import CALLS, named_events, saying
from tests.unit.api.fakes import FakeEngine, post
from vsched.aio.streams import OutputDelta, TokenLogprob
from vsched.api import ApiSettings
from vsched.errors import RequestFailed, RequestRefused

RESPONSES = "/v1/responses"
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": "hi", **fields}


def merged(events: list[Any]) -> dict[str, Any]:
    """Return the response that a client assembles from a stream, checking the order and numbers of its events."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *inner, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert created["response"]["output"] == []
    assert created["response"]["status"] == "in_progress"
    response: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert {**created["response"], **response} == response
    items: list[Any] = []
    while inner:
        items.append(item_of(inner, len(items)))
    assert items == response["output"]
    return response


def item_of(events: list[Any], index: int) -> Any:
    """Return the events of one item, from its beginning to its end."""
    added = events.pop(0)
    assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
    item = added["item"]
    assert item["status"] == "in_progress"
    is_call = item["type"] == "function_call"
    name = {"message": "output_text", "reasoning": "reasoning_text"}.get(
        item["type"], "function_call_arguments"
    )
    if not is_call:
        started = events.pop(0)
        assert started["type"] == "response.content_part.added"
        assert (started["part"]["type"], started["part"]["text"]) == (name, "")
    text = ""
    while events[0]["type"] == f"response.{name}.delta":
        delta = events.pop(0)
        assert (delta["item_id"], delta["output_index"]) == (item["id"], index)
        text += delta["delta"]
    done = events.pop(0)
    assert done["type"] == f"response.{name}.done"
    assert done["arguments" if is_call else "text"] == text
    if not is_call:
        ended = events.pop(0)
        assert (ended["type"], ended["part"]["text"]) == ("response.content_part.done", text)
    done = events.pop(0)
    assert (done["type"], done["output_index"]) == ("response.output_item.done", index)
    assert done["item"]["id"] == item["id"]
    return done["item"]


def bare(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item without ids and fields that are always empty."""
    names = {"type", "status", "name", "arguments"} & set(item)
    return {name: item[name] for name in names} | {
        "text": "".join(part["text"] for part in item.get("content", ()))
    }


@each_case("stream", [False, True])
@each_case("size", [1, 7, 500])
async def test_text_and_calls(size: int, *, stream: bool) -> None:
    reply = await post(saying(CALLS, size=size), RESPONSES, body(tools=TOOLS, stream=stream))
    response = merged(named_events(reply)) if stream else reply.json
    call = {"type": "function_call", "status": "completed", "name": "f", "text": ""}
    assert [bare(item) for item in response["output"]] == [
        {"type": "message", "status": "completed", "text": "Look."},
        call | {"arguments": '{"a": 1}'},
        call | {"arguments": '{"b": "ü"}'},
    ]
    ids = [item["id"] for item in response["output"]]
    calls = [item["call_id"] for item in response["output"][1:]]
    assert len(set(ids + calls)) == 5
    tokens = -(-len(CALLS) // size) + 1
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7 + tokens,
    }
    assert (response["status"], response["error"]) == ("completed", None)


@each_case("stream", [False, True])
async def test_thoughts_are_items_and_cut_answers_incomplete(*, stream: bool) -> None:
    settings = ApiSettings(reasoning_format="think")
    engine = saying("<think>hm</think>yes", "length", size=1)
    reply = await post(engine, RESPONSES, body(stream=stream, max_output_tokens=21), settings)
    response = merged(named_events(reply)) if stream else reply.json
    assert [bare(item) for item in response["output"]] == [
        {"type": "reasoning", "status": "completed", "text": "hm"},
        {"type": "message", "status": "incomplete", "text": "yes"},
    ]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


def reported(*tokens: str) -> list[TokenLogprob]:
    return [
        TokenLogprob(ord(token), -0.5, [(ord(token), -0.5), (120, -math.inf)]) for token in tokens
    ]


@each_case("stream", [False, True])
async def test_logprobs_are_those_of_the_texts(*, stream: bool) -> None:
    """Reasoning tokens are left out; half a character, and the token that completes it, come with the text."""
    engine = FakeEngine(
        OutputDelta("<think>", [60], reported("<")),
        OutputDelta("h</think>", [104, 62], reported("h", ">")),
        OutputDelta("", [97], reported("a")),
        OutputDelta("ab", [98], reported("b")),
        OutputDelta("", [0], reported("!"), finish_reason="stop"),
    )
    sent = body(stream=stream, include=["message.output_text.logprobs"], top_logprobs=2)
    reply = await post(engine, RESPONSES, sent, ApiSettings(reasoning_format="think"))
    assert engine.sampling.logprobs == 2
    events = named_events(reply) if stream else []
    response = merged(events) if stream else reply.json
    assert response["top_logprobs"] == 2
    found = response["output"][1]["content"][0]["logprobs"]
    assert [one["token"] for one in found] == ["a", "b", "!"]
    assert found[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "x", "logprob": -9999.0, "bytes": [120]},
        ],
    }
    streamed: dict[str, list[Any]] = {"output_text.delta": [], "output_text.done": []}
    for event in events:
        streamed.get(event["type"].removeprefix("response."), []).extend(event.get("logprobs", ()))
    assert all(each == found for each in streamed.values()) or not stream


@each_case(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"top_logprobs": 3}, 3),
        ({"top_logprobs": 0}, None),
    ],
)
async def test_logprobs_are_requested_in_two_ways(
    fields: dict[str, Any], wanted: int | None
) -> None:
    engine = saying("x")
    assert (await post(engine, RESPONSES, body(**fields))).status == 200
    assert engine.sampling.logprobs == wanted


async def test_an_answer_repeats_what_was_asked() -> None:
    requested = {
        "instructions": "Be short.",
        "max_output_tokens": 30,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_object"}},
    }
    response = (await post(saying("x"), RESPONSES, body(tools=TOOLS, **requested))).json
    assert {name: response[name] for name in requested} == requested
    assert response["tools"][0]["name"] == "f"
    assert (response["object"], response["store"]) == ("response", False)
    plain = (await post(saying("x"), RESPONSES, body())).json
    assert plain["text"] == {"format": {"type": "text"}}
    assert (plain["tool_choice"], plain["tools"]) == ("auto", [])


async def test_errors_have_openais_shape() -> None:
    engine = FakeEngine()
    engine.refusal = RequestRefused("full", code="queue_full", status=429)
    reply = await post(engine, RESPONSES, body())
    assert reply.status == 429
    assert reply.error["code"] == "rate_limit_exceeded"


async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    engine = FakeEngine(OutputDelta("a", [1]), RequestFailed("lost", code="group_lost"))
    reply = await post(engine, RESPONSES, body(stream=True))
    *before, last = named_events(reply)
    assert last == {
        "type": "error",
        "code": "group_lost",
        "message": "lost",
        "param": None,
        "sequence_number": len(before),
    }
