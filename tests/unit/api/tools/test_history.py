from __future__ import annotations

from typing import Any

import pytest

from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from vsched.api.contract import ApiSettings
from vsched.api.parameters import split_messages
from vsched.api.request_schema import CalledFunction, Message, ToolCall


def call(arguments: object, name: str = "add") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("sent", "read"),
    [('{"a": [1, "ö"]}', {"a": [1, "ö"]}), ({"a": 1}, {"a": 1}), ("", {}), (" {} ", {})],
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
    assert messages == [
        {"role": "assistant", "content": "", "tool_calls": [call(read)]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
    ]


@pytest.mark.parametrize(
    ("role", "sent", "param"),
    [
        ("assistant", call("no JSON"), "function.arguments"),
        ("assistant", call("[1]"), "function.arguments"),
        ("assistant", call('{"a":' * 40 + "1" + "}" * 40), "function.arguments"),
        ("assistant", call('{"a":' * 9000), "function.arguments"),
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


async def test_a_history_with_calls_is_answered() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call("{}")]},
        {"role": "tool", "tool_call_id": "c1", "content": "three"},
    ]
    assert (await post(engine, CHAT, chat(messages=messages))).status == 200
    assert engine.calls[0]["prompt"] == "assistant:tool:three"
