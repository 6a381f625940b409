"""Forced tool calls cut by max_tokens: partial arguments, no markup, the same streaming or not in every API."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.each_case import each_case
from tests.unit.api.compat.scripts import named_events, saying
from tests.unit.api.fakes import CHAT, Reply, chat, post
from tests.unit.api.tools.written_calls import written_calls
from vsched.aio.streams import OutputDelta
from vsched.api.tools.formats import CALL_FORMATS

ARGUMENTS = '{"a": "b"}'
ANSWER = written_calls(CALL_FORMATS["hermes"], [("f", {"a": "b"})])
AT = ANSWER.index(ARGUMENTS)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
SAID = [{"role": "user", "content": "hi"}]
Answer = tuple[str, list[str], str]
"""Content, arguments of calls, finish reason."""


def chat_answer(reply: Reply, *, stream: bool) -> Answer:
    if not stream:
        (choice,) = reply.json["choices"]
        calls = choice["message"].get("tool_calls", [])
        arguments = [call["function"]["arguments"] for call in calls]
        return choice["message"]["content"] or "", arguments, choice["finish_reason"]
    content, found, reason = "", [], ""
    for event in reply.events:
        (choice,) = event["choices"]
        content += choice["delta"].get("content", "")
        for call in choice["delta"].get("tool_calls", []):
            found += [""] if "id" in call else []
            found[-1] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, found, reason


def responses_answer(reply: Reply, *, stream: bool) -> Answer:
    found = named_events(reply)[-1]["response"] if stream else reply.json
    texts = [part["text"] for item in found["output"] for part in item.get("content", ())]
    calls = [item["arguments"] for item in found["output"] if item["type"] == "function_call"]
    return "".join(texts), calls, "length" if found["status"] == "incomplete" else "tool_calls"


def messages_answer(reply: Reply, *, stream: bool) -> Answer:
    content, calls = "", []
    if stream:
        events = named_events(reply)
        for event in events:
            match event:
                case {"content_block": {"type": "tool_use"}}:
                    calls.append("")
                case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                    calls[-1] += text
                case {"delta": {"type": "text_delta", "text": text}}:
                    content += text
        reason = events[-2]["delta"]["stop_reason"]
    else:
        for block in reply.json["content"]:
            if block["type"] == "tool_use":
                whole = msgspec.json.format(msgspec.json.encode(block["input"]), indent=0).decode()
                calls.append(block["input"].get("INVALID_JSON", whole))
            else:
                content += block["text"]
        reason = reply.json["stop_reason"]
    return content, calls, {"max_tokens": "length", "tool_use": "tool_calls"}[reason]


DIALECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    CHAT: (
        chat_answer,
        chat(tools=[{"type": "function", "function": FUNCTION}], tool_choice="required"),
    ),
    "/v1/responses": (
        responses_answer,
        {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    ),
    "/v1/messages": (
        messages_answer,
        {
            "model": "demo",
            "max_tokens": 9,
            "messages": SAID,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
        },
    ),
}


@each_case("path", DIALECTS)
@each_case("stream", [False, True])
async def test_a_forced_call_that_is_cut_shows_no_markup(path: str, stream: bool) -> None:
    read, body = DIALECTS[path]
    for end in (8, AT - 1, AT, AT + 5, len(ANSWER) - 9):
        engine = saying(ANSWER[:end], "length", size=1)
        answer = read(await post(engine, path, {**body, "stream": stream}), stream=stream)
        reported = ANSWER[AT : min(end, AT + len(ARGUMENTS))]
        assert answer == ("", [reported] if reported else [], "length")
    whole = await post(saying(ANSWER, size=1), path, {**body, "stream": stream})
    assert read(whole, stream=stream) == ("", [ARGUMENTS], "tool_calls")


@each_case("stream", [False, True])
async def test_half_an_object_is_no_call_that_ended(stream: bool) -> None:
    """A stop token within the arguments, or a model that gives up."""
    read, body = DIALECTS[CHAT]
    engine = saying(ANSWER[: AT + 5], "stop")
    reply = await post(engine, CHAT, {**body, "stream": stream})
    assert read(reply, stream=stream) == ("", ['{"a":'], "stop")


async def test_streams_of_calls_have_no_event_for_markup() -> None:
    """The role, then the call: clients show nothing for a dozen events with empty content."""
    _, body = DIALECTS[CHAT]
    reply = await post(saying(ANSWER, size=1), CHAT, {**body, "stream": True})
    deltas = [event["choices"][0]["delta"] for event in reply.events]
    first, *calls, last = deltas
    assert (first, last) == ({"role": "assistant"}, {})
    assert len(calls) == len(ARGUMENTS)
    assert all(set(each) == {"tool_calls"} for each in calls)


@each_case("fields", [{"logprobs": True}, {"return_token_ids": True}])
async def test_streams_of_calls_lose_no_token_that_was_requested(fields: dict[str, Any]) -> None:
    _, body = DIALECTS[CHAT]
    engine = saying(ANSWER, size=1)
    if "logprobs" in fields:
        deltas = [delta for delta in engine.script if isinstance(delta, OutputDelta)]
        engine.script = [msgspec.structs.replace(delta, logprobs=[]) for delta in deltas]
    reply = await post(engine, CHAT, {**body, **fields, "stream": True})
    assert len(reply.events) == len(ANSWER) + 1
