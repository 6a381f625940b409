"""Scripts of responses, and replies of each API as its clients read them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from tests.unit.api.fakes import FakeEngine, Reply, post
from vsched.aio.streams import OutputDelta
from vsched.api.request_schema import ChatRequest

CALLS = (
    'Look.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {"b": "ü"}}\n</tool_call>'
)


def saying(
    text: str, finish: str = "stop", *, size: int = 7, stop_string: str | None = None
) -> FakeEngine:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    last = OutputDelta("", [0], finish_reason=finish, stop_string=stop_string)
    return FakeEngine(*(OutputDelta(piece, [1]) for piece in pieces), last)


async def refused(path: str, body: object) -> str:
    """Message of a refusal in any API."""
    reply = await post(FakeEngine(), path, body)
    assert reply.status == 400
    return str(reply.json["error"]["message"])


class Answer(NamedTuple):
    """Content of a reply in any API: kinds with texts, and for calls the name; why it ended, as in chats."""

    parts: list[tuple[str, ...]]
    end: str


def chat_answer(reply: Reply, *, stream: bool) -> Answer:
    if stream:
        message, reason = _merged_deltas([event["choices"][0] for event in reply.events])
    else:
        (choice,) = reply.json["choices"]
        message, reason = choice["message"], choice["finish_reason"]
    parts: list[tuple[str, ...]] = [
        (kind, message[name])
        for kind, name in (("reasoning", "reasoning_content"), ("text", "content"))
        if message.get(name)
    ]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    parts += [("call", function["name"], function["arguments"]) for function in functions]
    return Answer(parts, reason)


def _merged_deltas(choices: list[Any]) -> tuple[dict[str, Any], str]:
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    calls = message["tool_calls"]
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert (call["type"], bool(call["id"])) == ("function", True)
                calls.append({"function": {"name": call["function"]["name"], "arguments": ""}})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                assert call["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += call["function"].get("arguments", "")
    return message, choices[-1]["finish_reason"]


def named_events(reply: Reply) -> list[Any]:
    """Return the events of a stream whose names are their types, and which has no end marker."""
    found: list[Any] = []
    *events, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        found.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def responses_answer(reply: Reply, *, stream: bool) -> Answer:
    response = whole_response(reply, stream=stream)
    parts: list[tuple[str, ...]] = []
    for item in response["output"]:
        if item["type"] == "function_call":
            parts.append(("call", item["name"], item["arguments"]))
        elif text := "".join(part["text"] for part in item["content"]):
            parts.append(("text" if item["type"] == "message" else "reasoning", text))
    ended = "tool_calls" if parts and parts[-1][0] == "call" else "stop"
    return Answer(parts, "length" if response["status"] == "incomplete" else ended)


def whole_response(reply: Reply, *, stream: bool) -> dict[str, Any]:
    """OpenAI's response, assembled from a stream whose events must have their order and numbers."""
    if not stream:
        return dict(reply.json)
    events = named_events(reply)
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
        items.append(_item_of(inner, len(items)))
    assert items == response["output"]
    return response


def _item_of(events: list[Any], index: int) -> Any:
    """Return one item, and remove its events."""
    added = events.pop(0)
    assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
    item = added["item"]
    assert item["status"] == "in_progress"
    is_call = item["type"] == "function_call"
    names = {"message": "output_text", "reasoning": "reasoning_text"}
    name = names.get(item["type"], "function_call_arguments")
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


def messages_answer(reply: Reply, *, stream: bool) -> Answer:
    message = whole_message(reply, stream=stream)
    parts: list[tuple[str, ...]] = []
    for block in message["content"]:
        match block:
            case {"type": "tool_use", "name": name, "input": arguments}:
                written = json.dumps(arguments, ensure_ascii=False)
                parts.append(("call", name, arguments.get("INVALID_JSON", written)))
            case {"type": "thinking", "thinking": text}:
                parts.append(("reasoning", text))
            case {"type": "text", "text": text} if text:
                parts.append(("text", text))
    ends = {"max_tokens": "length", "tool_use": "tool_calls", "end_turn": "stop"}
    return Answer(parts, ends[message["stop_reason"]])


def whole_message(reply: Reply, *, stream: bool) -> dict[str, Any]:
    """Anthropic's message, assembled from a stream whose events must have their order."""
    if not stream:
        return dict(reply.json)
    first, *inner, delta, last = named_events(reply)
    assert first["type"] == "message_start"
    assert last == {"type": "message_stop"}
    message: dict[str, Any] = first["message"]
    content = message["content"]
    assert (content, message["usage"]["output_tokens"]) == ([], 0)
    is_open = False
    for event in inner:
        match event["type"]:
            case "content_block_start":
                assert (is_open, event["index"]) == (False, len(content))
                block = event["content_block"]
                assert not block[_text_of(block)], "text, or arguments, are still to come"
                content.append({**block, _text_of(block): ""})
            case "content_block_delta":
                assert (is_open, event["index"]) == (True, len(content) - 1)
                (text,) = [value for key, value in event["delta"].items() if key != "type"]
                assert text
                content[-1][_text_of(content[-1])] += text
            case _:
                assert event == {"type": "content_block_stop", "index": len(content) - 1}
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = _arguments(block["input"])
    assert delta["type"] == "message_delta"
    return {**message, **delta["delta"], "usage": delta["usage"]}


def _text_of(block: dict[str, Any]) -> str:
    return "input" if block["type"] == "tool_use" else str(block["type"])


def _arguments(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text or "{}"))
    except json.JSONDecodeError:
        return {"INVALID_JSON": text}


def plain(request: ChatRequest) -> list[dict[str, Any]]:
    """Return messages as builtins, without unset fields."""
    found: list[dict[str, Any]] = _without_unset(msgspec.to_builtins(request.messages))
    return found


def _without_unset(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_unset(each) for key, each in value.items() if each is not None}
    return [_without_unset(each) for each in value] if isinstance(value, list) else value
