from __future__ import annotations

from typing import Any

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from vsched.api import ApiSettings

HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "x"}}]},
    {
        "role": "assistant",
        "content": "there",
        "refusal": None,
        "annotations": [],
        "audio": {"id": "x"},
        "function_call": None,
        "reasoning": {"a": [1]},
        "provider_specific_fields": {"citations": None},
    },
    {"role": "user", "content": "again"},
]


async def test_unknown_fields_of_messages_are_ignored() -> None:
    """Clients send back histories with fields that other servers added."""
    engine = FakeEngine()
    reply = await post(engine, CHAT, chat(messages=HISTORY))
    assert reply.status == 200
    assert engine.calls[0]["prompt"] == "user:hiassistant:thereuser:again"


@each_case(
    ("changed", "name"),
    [
        ({}, "messages[0].content[0].cache_control"),
        ({0: {"role": "user", "content": "hi"}}, "messages[1].provider_specific_fields"),
    ],
)
async def test_unknown_fields_are_named_if_the_settings_ask_for_it(
    changed: dict[int, Any], name: str
) -> None:
    messages = [changed.get(index, message) for index, message in enumerate(HISTORY)]
    settings = ApiSettings(strict_fields=True)
    reply = await post(FakeEngine(), CHAT, chat(messages=messages), settings)
    assert (reply.status, reply.error["code"]) == (400, "unknown_parameter")
    assert reply.error["param"] == name
    assert "server.strict_fields" in reply.error["message"]


async def test_known_fields_pass_strictness_wherever_they_are() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":{"b":1}}'}}
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:one"}}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ]
    fields = {
        "metadata": {"any": {"thing": 1}},
        "stream_options": {"include_usage": True},
        "stream": True,
    }
    body = chat(messages=messages, **fields)
    reply = await post(FakeEngine(), CHAT, body, ApiSettings(strict_fields=True))
    assert reply.status == 200, reply.body


@each_case("sent", [b'"user":{"\xff":1}', b'"user":' + b"[" * 900 + b"]" * 900])
async def test_strictness_survives_what_decoding_skips(sent: bytes) -> None:
    body = b'{"messages":[{"role":"user","content":"x","odd":{%s}}]}' % sent
    reply = await post(FakeEngine(), CHAT, body, ApiSettings(strict_fields=True))
    assert reply.status == 400
