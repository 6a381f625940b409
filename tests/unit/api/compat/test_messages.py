"""Anthropic's API: requests become chats, and replies and errors have its shape."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.each_case import each_case
from tests.unit.api.compat.scripts import CALLS, plain, refused, saying, whole_message
from tests.unit.api.fakes import IMAGE_TOKENS, FakeEngine, accepted, ask, post
from vsched.api.compat.messages import MessagesRequest, chat_request
from vsched.api.request_schema import ChatRequest
from vsched.errors import RequestFailed, RequestRefused

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
KEY = "key"
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "demo", "max_tokens": 9, "messages": messages, **fields}


def user(*content: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(content)}]


@each_case("stream", [False, True])
async def test_an_answer_is_a_message_of_blocks_with_usage(*, stream: bool) -> None:
    reply = await post(saying(CALLS), MESSAGES, body(tools=TOOLS, stream=stream))
    message = whole_message(reply, stream=stream)
    assert message.pop("id").startswith("msg-")
    assert all(block.pop("id") for block in message["content"][1:])
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
            "output_tokens": -(-len(CALLS) // 7) + 1,
        },
    }


@each_case("stream", [False, True])
@each_case(
    ("finish", "stop", "reason"),
    [("stop", None, "end_turn"), ("stop", "END", "stop_sequence"), ("length", None, "max_tokens")],
)
async def test_ends(finish: str, stop: str | None, reason: str, *, stream: bool) -> None:
    engine = saying("", finish, stop_string=stop)
    message = whole_message(await post(engine, MESSAGES, body(stream=stream)), stream=stream)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    assert message["content"] == [{"type": "text", "text": ""}], "clients look at the first block"


@each_case(
    ("fields", "key", "error", "status", "kind"),
    [
        ({}, KEY, RequestRefused("no", code="context_exceeded"), 400, "invalid_request_error"),
        ({}, KEY, RequestRefused("no", code="x", status=413), 413, "request_too_large"),
        ({}, KEY, RequestRefused("no", code="queue_full", status=429), 429, "rate_limit_error"),
        ({}, KEY, RequestRefused("no", code="x", status=503, retry_after_s=5), 529,
         "overloaded_error"),
        ({}, KEY, RequestFailed("no"), 500, "api_error"),
        ({}, KEY, ValueError("a bug"), 500, "api_error"),
        ({"model": "claude"}, KEY, None, 404, "not_found_error"),
        ({}, "", None, 401, "authentication_error"),
        ({}, "keys", None, 401, "authentication_error"),
    ],
)  # fmt: skip
async def test_errors_have_anthropics_shape(
    fields: dict[str, Any], key: str, error: Exception | None, status: int, kind: str
) -> None:
    engine = FakeEngine()
    engine.refusal = error
    headers = {"x-api-key": key}
    reply = await ask("POST", MESSAGES, body(**fields), engine=engine, headers=headers, api_key=KEY)
    assert (reply.status, reply.json["type"]) == (status, "error")
    assert reply.json["error"]["type"] == kind
    assert set(reply.json["error"]) == {"type", "message"}
    found = reply.json["error"]["message"].startswith("prompt is too long: ")  # for Claude Code
    assert found == (getattr(error, "code", "") == "context_exceeded")


def meant(**fields: Any) -> ChatRequest:
    return chat_request(msgspec.convert(body(**fields), MessagesRequest))


def image(data: str = "AAAA") -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


def test_a_history_with_calls_and_images() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}
    request = meant(
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            *user({"type": "text", "text": "See"}, image(), url),
            *user(
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "2", "name": "f", "input": {}},
                role="assistant",
            ),
            *user(
                {"type": "tool_result", "tool_use_id": "1", "content": "one"},
                {"type": "tool_result", "tool_use_id": "2", "content": [image()]},
                {"type": "text", "text": "And?"},
            ),
        ],
    )
    first, second = (
        {"type": "image_url", "image_url": source}
        for source in ("data:image/png;base64,AAAA", "https://a.b/c.png")
    )
    calls = [
        {"id": "1", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "2", "function": {"name": "f", "arguments": {}}},
    ]
    look = {"content": "I look.", "reasoning_content": "hm", "tool_calls": calls}
    assert plain(request) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "See"}, first, second]},
        {"role": "assistant", **look},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": [first], "tool_call_id": "2"},
        {"role": "user", "content": "And?"},
    ]
    assert not request.continue_final_message


def test_an_answer_that_is_begun_goes_on() -> None:
    started = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]
    assert meant(messages=started).continue_final_message
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    started[1] = {"role": "assistant", "content": [call]}  # type: ignore[dict-item]
    assert not meant(messages=started).continue_final_message


async def test_parameters_reach_the_engine() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"effort": "high", "format": {"type": "json_schema", "schema": schema}}
    sent = body(stop_sequences=["END"], temperature=0.5, top_p=0.9, top_k=3, seed=4, max_tokens=8)
    found = (await accepted(MESSAGES, sent | {"output_config": config})).sampling
    assert (found.stop, found.temperature, found.top_p) == (("END",), 0.5, 0.9)
    assert (found.top_k, found.seed, found.max_tokens) == (3, 4, 8)
    assert msgspec.json.decode(found.grammar) == {"json_schema": schema}
    ignored = (
        "anthropic_beta anthropic_version betas compaction fallbacks user_profile_id workspace_id"
    )
    await accepted(MESSAGES, body(**dict.fromkeys(ignored.split(), "x")))


def test_choices_of_tools_and_thinking() -> None:
    choices = {"auto": "auto", "any": "required", "none": "none"}
    for ours, theirs in choices.items():
        assert meant(tools=TOOLS, tool_choice={"type": ours}).tool_choice == theirs
    sent = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
    named = meant(tools=TOOLS, tool_choice=sent)
    assert msgspec.to_builtins(named.tool_choice)["function"] == {"name": "f"}
    assert named.parallel_tool_calls is False
    for kind, thinks in (("disabled", False), ("enabled", True), ("adaptive", True)):
        request = meant(thinking={"type": kind, "budget_tokens": 2048})
        assert request.chat_template_kwargs == {"enable_thinking": thinks, "thinking": thinks}
    effort = meant(output_config={"effort": "max"}).chat_template_kwargs
    assert effort == {"reasoning_effort": "max"}
    assert not meant().chat_template_kwargs


def test_results_of_searches_and_references_of_tools_are_texts() -> None:
    text = {"type": "text", "text": "b"}
    found = {"type": "search_result", "source": "https://a.b", "title": "A", "content": [text]}
    reference = {"type": "tool_reference", "tool_name": "get_weather"}
    request = meant(
        messages=[
            *user(found),
            *user({"type": "tool_result", "tool_use_id": "1", "content": [reference, found]}),
            *user({"type": "tool_result", "tool_use_id": "2", "content": [reference]}),
        ]
    )
    texts = [{"type": "text", "text": text} for text in ("get_weather", "A\nhttps://a.b\nb")]
    assert plain(request) == [
        {"role": "user", "content": "A\nhttps://a.b\nb"},
        {"role": "tool", "content": texts, "tool_call_id": "1"},
        {"role": "tool", "content": "get_weather", "tool_call_id": "2"},
    ]


def test_system_messages_stay_where_they_are() -> None:
    text = {"type": "text", "text": "b"}
    request = meant(system="a", messages=[*user(text), *user(text, role="system")])
    assert [message.role for message in request.messages] == ["system", "user", "system"]


SERVERS_BLOCKS = (
    "document", "server_tool_use", "web_search_tool_result", "mcp_tool_use", "compaction",
    "fallback",
)  # fmt: skip
SERVERS_TOOLS = (
    "bash_20250124", "web_search_20260318", "mcp_toolset", "computer_toolset_20260801",
)  # fmt: skip
"""A few of the names that the product lists, or recognizes by their endings."""


@each_case(
    ("fields", "wanted"),
    [
        ({"messages": []}, "`messages` is out of bounds"),
        ({"messages": None}, "`messages` is of the wrong type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "limit user, assistant or system"),
        ({"messages": user(image(), role="system")}, "with role system"),
        ({"messages": user({"type": ["text"]})}, "is no kind of content part: value a list"),
        ({"messages": user({"type": "movie"})}, "search_result, tool_use, tool_result or"),
        ({"messages": user({"type": "tool_use", "id": "", "name": "f", "input": {}})},
         "with role user"),
        ({"messages": user(image(), role="assistant")}, "with role assistant"),
        ({"messages": user({"type": "image", "source": {"type": "file"}})}, 'source is "file"'),
        ({"stop_sequences": [""]}, "`stop_sequences` is out of bounds"),
        ({"max_tokens": 0}, "`max_tokens` is out of bounds"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "is not supported"),
        ({"tools": [{"type": "custom", "name": 3}]}, "`tools[0].name` is of the wrong type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "`tool_choice.type` is out"),
        ({"tool_choice": {"type": "any"}}, "`tool_choice` needs `tools`"),
        ({"output_config": {"format": {"type": "xml"}}}, "`output_config.format.type` is not"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "`output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "`mcp_servers` is not supported"),
        ({"max_token": 3}, "`max_token` is not a known parameter"),
        ({"chat_template_kwargs": {"x": 1}}, "`chat_template_kwargs` is out of bounds"),
        *(
            ({"messages": messages}, f'.type` "{kind}" is not supported. Remedy: ')
            for kind in SERVERS_BLOCKS
            for messages in (
                user({"type": kind}, role="assistant"),
                user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": kind}]}),
            )
        ),
        *(
            ({"tools": [*TOOLS, {"type": kind, **named}]},
             f'`tools[1].type` "{kind}" is not supported. Remedy:')
            for kind in SERVERS_TOOLS
            for named in ({}, {"name": "x"})
        ),
    ],
)  # fmt: skip
async def test_garbage_is_refused_by_its_name(fields: dict[str, Any], wanted: str) -> None:
    assert wanted in await refused(MESSAGES, body(**fields))


@each_case("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_thread_is_refused_so_that_the_client_goes_on_without(thread: object) -> None:
    """Anthropic's tool_runner begins with one, and reads these details: it sends the whole history then."""
    reply = await post(FakeEngine(), MESSAGES, body(thread=thread))
    error = reply.json["error"]
    assert (reply.status, error["type"]) == (400, "invalid_request_error")
    assert error["details"]["error_code"] == "thread_unsupported_request"
    assert "Remedy: send all messages with each request" in error["message"]
    assert (await post(FakeEngine(), MESSAGES, body(thread=None))).status == 200


async def test_tokens_are_counted() -> None:
    engine = FakeEngine()
    sent = {"model": "demo", "messages": [{"role": "user", "content": "four"}]}
    reply = await post(engine, COUNT, sent)
    assert reply.json == {"input_tokens": len("user:four")}
    assert (await post(engine, COUNT, {**sent, "tools": TOOLS})).json["input_tokens"] > 9
    seen = await post(engine, COUNT, {**sent, "messages": user(image())})
    assert seen.json["input_tokens"] > IMAGE_TOKENS
    assert not engine.calls
