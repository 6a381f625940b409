"""Tool calls in OpenAI's format, streaming and not, for the same requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.each_case import each_case
from tests.unit.api.compat.scripts import CALLS, saying
from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from vsched.api.contract import ApiSettings

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def merged(events: list[Any]) -> dict[str, Any]:
    """Return the message that a client assembles from a stream."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for event in events:
        delta = event["choices"][0]["delta"]
        message["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            calls = message["tool_calls"]
            if call["index"] == len(calls):
                assert call["type"] == "function"
                calls.append({"id": call["id"], "function": {"arguments": "", **call["function"]}})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                assert call["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return message


async def test_a_whole_answer_with_calls() -> None:
    requested = saying(CALLS)
    reply = await post(requested, CHAT, chat(tools=TOOLS))
    (choice,) = reply.json["choices"]
    ids = [call.pop("id") for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert choice == {
        "index": 0,
        "finish_reason": "tool_calls",
        "logprobs": None,
        "token_ids": None,
        "message": {
            "role": "assistant",
            "content": "Look.",
            "refusal": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                {"type": "function", "function": {"name": "f", "arguments": '{"b": "ü"}'}},
            ],
        },
    }
    assert requested.calls[0]["prompt"].startswith(
        "tools=[{'type': 'function', 'function': {'name': 'f'"
    )


@each_case("size", [1, 3, 1000])
async def test_stream_equals_the_non_streaming_response(size: int) -> None:
    reply = await post(saying(CALLS, size=size), CHAT, chat(tools=TOOLS, stream=True))
    first, last = reply.events[0]["choices"][0], reply.events[-1]["choices"][0]
    assert first["delta"]["role"] == "assistant"
    assert last["finish_reason"] == "tool_calls"
    found = merged(reply.events)
    assert found["content"] == "Look."
    assert [call["function"] for call in found["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "f", "arguments": '{"b": "ü"}'},
    ]


@each_case("stream", [False, True])
async def test_a_single_call_is_the_first(stream: bool) -> None:
    """Further ones are dropped, even one that is incomplete, but not the text."""
    fields = {"tools": TOOLS, "parallel_tool_calls": False, "stream": stream}
    reply = await post(saying(CALLS[:-16]), CHAT, chat(**fields))
    message = merged(reply.events) if stream else reply.json["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert message["content"] == "Look."
    choices = (reply.events[-1] if stream else reply.json)["choices"]
    assert choices[0]["finish_reason"] == "tool_calls"


async def test_answers_with_calls_alone_and_without_calls() -> None:
    reply = await post(saying(CALLS.removeprefix("Look.")), CHAT, chat(tools=TOOLS))
    assert reply.json["choices"][0]["message"]["content"] is None
    (choice,) = (await post(saying("Hello"), CHAT, chat(tools=TOOLS))).json["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}


async def test_without_tools_nothing_is_read_as_a_call() -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = (await post(saying(CALLS), CHAT, chat(**fields))).json["choices"][0]
        assert choice["message"]["content"] == CALLS


async def test_a_model_whose_form_is_unknown_takes_no_tools() -> None:
    requested = saying("Hello")
    requested.preprocessor.chat_template = "{{ tools }}"
    reply = await post(requested, CHAT, chat(tools=TOOLS))
    assert (reply.status, reply.error["code"]) == (400, "tools_not_supported")
    assert "model.tool_format" in reply.error["message"]
    reply = await post(requested, CHAT, chat(tools=TOOLS), ApiSettings(tool_format="hermes"))
    assert reply.status == 200


THOUGHT = "<think>\nLet me see.\n</think>\n\nYes."


def thinking(text: str = THOUGHT) -> FakeEngine:
    """An engine whose template shows how it thinks."""
    made = saying(text)
    made.preprocessor.chat_template = "{{ '<think>' }}"
    return made


async def test_reasoning_is_returned_next_to_the_content() -> None:
    message = (await post(thinking(), CHAT, chat())).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Yes.")
    assert message["reasoning"] == message["reasoning_content"]
    events = (await post(thinking(), CHAT, chat(stream=True))).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(each.get("reasoning_content", "") for each in deltas) == "Let me see."
    assert "".join(each.get("content", "") for each in deltas) == "Yes."
    assert len([each for each in deltas if each.get("reasoning_content")]) > 1
    assert all(each.get("reasoning_content") == each.get("reasoning") for each in deltas)


async def test_reasoning_is_left_out_unless_wanted() -> None:
    """Each of its tokens still has an event, because clients count them."""
    whole = await post(thinking(), CHAT, chat(include_reasoning=False))
    streamed = await post(thinking(), CHAT, chat(include_reasoning=False, stream=True))
    assert b"reasoning" not in whole.body + streamed.body
    assert whole.json["choices"][0]["message"]["content"] == "Yes."
    deltas = [event["choices"][0]["delta"] for event in streamed.events]
    assert "".join(each["content"] for each in deltas) == "Yes."
    assert len(deltas) == len((await post(thinking(), CHAT, chat(stream=True))).events)


async def test_reasoning_is_content_if_the_settings_say_so() -> None:
    reply = await post(thinking(), CHAT, chat(), ApiSettings(reasoning_format="none"))
    assert reply.json["choices"][0]["message"]["content"] == THOUGHT


@pytest.mark.parametrize("length", [1, 50_000])
async def test_reasoning_that_the_prompt_began_goes_on(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Also for a long prompt, which is rendered later; a grammar constrains the text after the reasoning."""
    requested = thinking("Let me see.</think>Yes.")
    front = requested.preprocessor
    render = front.render
    monkeypatch.setattr(
        front, "render", lambda *given, **more: render(*given, **more) + "<think>\n"
    )
    messages = [{"role": "user", "content": "x" * length}]
    body = chat(messages=messages, guided_regex="Yes")
    message = (await post(requested, CHAT, body)).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Yes.")
    grammar = msgspec.json.decode(requested.sampling.grammar)
    assert grammar == {"thought": {"end": "</think>", "answer": {"regex": "Yes"}}}
