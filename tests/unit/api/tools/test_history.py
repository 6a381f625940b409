from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from vsched.api.chat_messages import ARGUMENTS_CHARACTERS_MAX, split_messages, with_template_calls
from vsched.api.contract import ApiSettings
from vsched.api.errors import ParameterRefused
from vsched.api.request_schema import CalledFunction, Message, ToolCall
from vsched.media import MediaReference


def call(arguments: object, name: str = "add") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@each_case(
    ("sent", "read"),
    [
        ('{"a": [1, "ö"]}', {"a": [1, "ö"]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" {} ", {}),
        (None, {}),
        ("null", {}),
        # Malformed or truncated arguments are the model's, not an error of the client.
        ('{"a": [1', {"INVALID_JSON": '{"a": [1'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a":' * 3000, {"INVALID_JSON": '{"a":' * 3000}),
    ],
)
def test_arguments_reach_the_template_as_an_object(sent: Any, read: dict[str, Any]) -> None:
    calls = [ToolCall(CalledFunction("add", sent), id="c1")]
    messages, _ = split_messages(
        [
            Message("assistant", tool_calls=calls),
            Message("tool", "3", name="add", tool_call_id="c1"),
        ],
        ApiSettings(),
    )
    assert with_template_calls(messages) == [
        {"role": "assistant", "content": "", "tool_calls": [call(read)]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
    ]


def test_deprecated_calls_are_read_as_calls() -> None:
    sent = [
        {"role": "assistant", "content": None, "function_call": call('{"a": 1}')["function"]},
        {"role": "function", "name": "add", "content": "3"},
    ]
    messages, _ = split_messages(msgspec.convert(sent, list[Message]), ApiSettings())
    assert with_template_calls(messages) == [
        {"role": "assistant", "content": "", "tool_calls": [{**call({"a": 1}), "id": ""}]},
        {"role": "tool", "content": "3", "name": "add"},
    ]


@each_case(
    ("parts", "content", "thought"),
    [
        ([{"type": "refusal", "refusal": "No."}], ["No."], None),
        ([{"type": "output_text", "text": "a", "annotations": []}], ["a"], None),
        ([{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}], ["a", "b"], None),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}], ["b"], "hm"),
        ([{"type": "redacted_thinking", "data": "x"}], [], None),
    ],
)
def test_parts_of_other_apis_in_a_history(
    parts: list[dict[str, Any]], content: list[str], thought: str | None
) -> None:
    """Clients send back responses of other servers and APIs."""
    sent = [{"role": "assistant", "content": parts}]
    [message], _ = split_messages(msgspec.convert(sent, list[Message]), ApiSettings())
    assert message["content"] == [{"type": "text", "text": text} for text in content]
    assert message.get("reasoning_content") == thought


def test_thinking_of_others_than_the_assistant_is_text() -> None:
    sent = [{"role": "user", "content": [{"type": "thinking", "thinking": "hm"}]}]
    [message], _ = split_messages(msgspec.convert(sent, list[Message]), ApiSettings())
    assert message == {"role": "user", "content": [{"type": "text", "text": "hm"}]}


def test_a_refusal_is_the_content_of_its_message() -> None:
    [message], _ = split_messages([Message("assistant", refusal="No.")], ApiSettings())
    assert message["content"] == "No."


def test_images_are_taken_as_responses_have_them() -> None:
    part = {"type": "input_image", "image_url": "data:,x", "detail": "auto"}
    sent = [{"role": "user", "content": [part]}]
    _, images = split_messages(msgspec.convert(sent, list[Message]), ApiSettings())
    assert images == [MediaReference("data:,x")]


@each_case(
    ("role", "sent", "param"),
    [
        ("assistant", call('{"a":' * 40 + "1" + "}" * 40), "function.arguments"),
        ("assistant", call("{}", name="<|im_end|>"), "function.name"),
        ("user", call("{}"), "messages[0].tool_calls"),
    ],
)
async def test_calls_that_are_none_are_refused(role: str, sent: Any, param: str) -> None:
    messages = [{"role": role, "content": None, "tool_calls": [sent]}]
    reply = await post(FakeEngine(), CHAT, chat(messages=messages))
    assert reply.status == 400
    assert reply.error["param"].endswith(param)
    assert "limit" in reply.error["message"]


@each_case("text", ["{" + " " * 20_000 + "}", '{"a":' * 40 + " " * 20_000 + "1" + "}" * 40])
async def test_long_arguments_are_decoded_off_the_loop(text: str) -> None:
    engine = FakeEngine()
    messages = [{"role": "assistant", "content": None, "tool_calls": [call(text)]}]
    assert (await post(engine, CHAT, chat(messages=messages))).status == 200
    prompt = engine.calls[0]["prompt"]
    assert callable(prompt)  # in the thread that tokenizes
    if text.startswith("{ "):
        assert prompt() == "assistant:"
    else:
        with pytest.raises(ParameterRefused, match="one JSON object"):
            prompt()


async def test_arguments_have_a_limit_together() -> None:
    sent = [call(" " * (ARGUMENTS_CHARACTERS_MAX // 2 + 1))] * 2
    messages = [{"role": "assistant", "content": None, "tool_calls": sent}]
    reply = await post(FakeEngine(), CHAT, chat(messages=messages))
    assert reply.status == 400
    assert f"{ARGUMENTS_CHARACTERS_MAX} characters" in reply.error["message"]


def test_reasoning_of_a_history_reaches_the_template() -> None:
    messages, _ = split_messages(
        [
            Message("assistant", "Yes.", reasoning_content="Let me see."),
            Message("assistant", "No.", reasoning="Hm."),
            Message("assistant", "No.", reasoning_content={}),
            Message("user", "Why?", reasoning_content="x"),
        ],
        ApiSettings(),
    )
    assert [message.get("reasoning_content") for message in messages] == [
        "Let me see.", "Hm.", None, None,
    ]  # fmt: skip
