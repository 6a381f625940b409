"""OpenAI's responses: requests become chats, and replies have their ids, usage and log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tests.each_case import each_case
from tests.unit.api.compat.scripts import (
    CALLS,
    named_events,
    plain,
    refused,
    saying,
    whole_response,
)
from tests.unit.api.fakes import CHAT, FakeEngine, accepted, chat, post
from vsched.aio.streams import OutputDelta, TokenLogprob
from vsched.api.compat.responses import ResponsesRequest, chat_request
from vsched.api.request_schema import ChatRequest
from vsched.errors import RequestRefused

RESPONSES = "/v1/responses"
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": "hi", **fields}


@each_case("stream", [False, True])
async def test_an_answer_has_ids_and_usage(*, stream: bool) -> None:
    reply = await post(saying(CALLS), RESPONSES, body(tools=TOOLS, stream=stream))
    response = whole_response(reply, stream=stream)
    assert [item["status"] for item in response["output"]] == ["completed"] * 3
    ids = [item["id"] for item in response["output"]]
    calls = [item["call_id"] for item in response["output"][1:]]
    assert len(set(ids + calls)) == 5
    tokens = -(-len(CALLS) // 7) + 1
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7 + tokens,
    }
    assert (response["status"], response["error"]) == ("completed", None)


@each_case("stream", [False, True])
async def test_cut_answers_are_incomplete(*, stream: bool) -> None:
    engine = saying("<think>hm</think>yes", "length", size=1)
    sent = body(stream=stream, max_output_tokens=21)
    reply = await post(engine, RESPONSES, sent, reasoning_format="think")
    response = whole_response(reply, stream=stream)
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


def reported(*tokens: str) -> list[TokenLogprob]:
    return [TokenLogprob(ord(one), -0.5, [(ord(one), -0.5), (120, -math.inf)]) for one in tokens]


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
    reply = await post(engine, RESPONSES, sent, reasoning_format="think")
    assert engine.sampling.logprobs == 2
    response = whole_response(reply, stream=stream)
    assert response["top_logprobs"] == 2
    found = response["output"][1]["content"][0]["logprobs"]
    assert [one["token"] for one in found] == ["a", "b", "!"]
    first, infinite = (
        {"token": token, "logprob": value, "bytes": [ord(token)]}
        for token, value in (("a", -0.5), ("x", -9999.0))
    )
    assert found[0] == {**first, "top_logprobs": [first, infinite]}
    for end in ("delta", "done") if stream else ():
        kind = f"response.output_text.{end}"
        events = [event for event in named_events(reply) if event["type"] == kind]
        assert [one for event in events for one in event["logprobs"]] == found


async def test_logprobs_are_requested_in_two_ways() -> None:
    included = {"include": ["message.output_text.logprobs"]}
    for fields, count in ((included, 0), ({"top_logprobs": 3}, 3), ({"top_logprobs": 0}, None)):
        assert (await accepted(RESPONSES, body(**fields))).sampling.logprobs == count
    assert (await accepted(RESPONSES, body())).sampling.logprobs is None


async def test_an_answer_repeats_the_request_parameters() -> None:
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


URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
TEXT = {"type": "input_text", "text": "See"}


def meant(**fields: Any) -> ChatRequest:
    return chat_request(msgspec.convert(body(**fields), ResponsesRequest))


def test_a_history_of_items_and_instructions() -> None:
    """Items of one turn of the model are merged into one message; texts may have the type that chats use."""
    request = meant(
        instructions="Be short.",
        input=[
            {"role": "user", "content": [TEXT, IMAGE]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [
                {"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [
                {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "x"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "1", "output": "one"},
            {"type": "function_call_output", "call_id": "2", "output": [TEXT, IMAGE]},
            {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "3", "output": ""},
            {"role": "assistant", "content": "So."},
            {"role": "developer", "content": [{"type": "text", "text": "Go on."}]},
        ]
    )  # fmt: skip
    parts = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": URL}]
    messages = plain(request)
    for message in messages:
        calls = message.pop("tool_calls", ())
        message["calls"] = [(call["id"], call["function"]["name"]) for call in calls]
    calls = [("1", "f"), ("2", "g")]
    look = {"content": "I look.", "reasoning_content": "hm", "calls": calls}
    assert messages == [
        {"role": "system", "content": "Be short.", "calls": []},
        {"role": "user", "content": parts, "calls": []},
        {"role": "assistant", **look},
        {"role": "tool", "content": "one", "tool_call_id": "1", "calls": []},
        {"role": "tool", "content": parts, "tool_call_id": "2", "calls": []},
        {"role": "assistant", "calls": [("3", "f")]},
        {"role": "tool", "content": "", "tool_call_id": "3", "calls": []},
        {"role": "assistant", "content": "So.", "calls": []},
        {"role": "developer", "content": "Go on.", "calls": []},
    ]


async def test_parameters_reach_the_engine() -> None:
    engine = FakeEngine()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    sent = body(max_output_tokens=8, temperature=0.5, top_p=0.9, seed=4, text={"format": form})
    assert (await post(engine, RESPONSES, sent)).status == 200
    found = engine.sampling
    assert (found.max_tokens, found.temperature, found.top_p, found.seed) == (8, 0.5, 0.9, 4)
    assert msgspec.json.decode(found.grammar) == {"json_schema": schema}
    engine.refusal = RequestRefused("it cannot be used. Remedy: mend it.", code="invalid_grammar")
    assert (await post(engine, RESPONSES, sent)).error["param"] == "text.format"


def test_choices_of_tools() -> None:
    for choice in ("auto", "none", "required"):
        assert meant(tools=TOOLS, tool_choice=choice).tool_choice == choice
    named = {"type": "function", "name": "f"}
    found = msgspec.to_builtins(meant(tools=TOOLS, tool_choice=named).tool_choice)
    assert found["function"] == {"name": "f"}
    some = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    found = msgspec.to_builtins(meant(tools=TOOLS, tool_choice=some).tool_choice)
    assert found["allowed_tools"] == {"mode": "required", "tools": [{"function": {"name": "f"}}]}


async def test_fields_without_effect_are_accepted() -> None:
    """`store` as in chats; responses report that nothing is stored."""
    sent = body(
        store=False, include=["reasoning.encrypted_content"], truncation="disabled",
        reasoning={"effort": "low", "summary": "auto"}, background=False, previous_response_id=None, user="u",
        stream_options={"include_obfuscation": False}, top_logprobs=0,
        client_metadata={"x": "y"}, access_programs={}, background_options={}, image={},
    )  # fmt: skip
    await accepted(RESPONSES, sent)
    assert meant(reasoning={"effort": "low"}).reasoning_effort == "low"
    for store in (True, False, None):
        reply = await post(FakeEngine(), RESPONSES, body(store=store))
        assert (reply.status, reply.json["store"]) == (200, False)
        await accepted(CHAT, chat(store=store))


async def test_fields_that_a_response_repeats_are_limited() -> None:
    """They are in memory until its end, unlike the input."""
    many = "x" * (1 << 20)
    await accepted(RESPONSES, body(input=many, metadata={"key": many[:-4096]}))
    unseen = {"tools": [{**TOOLS[0], "description": many}], "tool_choice": "none"}
    deep = msgspec.Raw(b"[" * 700 + b"]" * 700)
    for fields in ({"metadata": {"key": many}}, {"user": [many]}, unseen):
        message = await refused(RESPONSES, body(**fields))
        assert "which the response repeats, are too large" in message
    assert "nested too deeply" in await refused(RESPONSES, body(metadata={"key": deep}))


def said(*parts: object) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


SERVERS_ITEMS = (
    "item_reference", "file_search_call", "computer_call_output", "mcp_call",
    "custom_tool_call_output",
)  # fmt: skip
SERVERS_TOOLS = (
    "file_search", "web_search_2025_08_26", "mcp", "code_interpreter", "custom", "apply_patch",
)  # fmt: skip
"""A few of the names that the product lists."""


@each_case(
    ("fields", "wanted"),
    [
        ({"previous_response_id": "resp_1"}, "`previous_response_id` is not supported"),
        ({"conversation": "c"}, "`conversation` is not supported"),
        ({"background": True}, "`background` is not supported"),
        ({"truncation": "auto"}, "`truncation` is not supported"),
        ({"include": ["file_search_call.results"]}, "`include` is out of bounds"),
        ({"top_logprobs": 99}, "`top_logprobs` is out of bounds"),
        ({"input": []}, "`input` is out of bounds"),
        ({"input": 3}, "`input` is of the wrong type"),
        ({"input": [{"type": "movie", "id": "x"}]}, "`input[0].type` is out of bounds"),
        ({"input": [{"id": "x"}]}, '`input[0].type` "item_reference" is not supported'),
        ({"input": [{"type": "message", "content": "x"}]}, "`input[0]` lacks"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "`input[0]` lacks"),
        ({"input": [{"role": "tool", "content": "x"}]},
         "limit system, developer, user or assistant"),
        (said({"type": "movie"}), "limit input_text,"),
        (said({"type": "input_image", "file_id": "f"}),
         "`input[0].content.file_id` is not supported"),
        (said({"type": "input_image", "detail": "low"}), "`image_url` is missing"),
        ({"max_output_tokens": -1}, "`max_output_tokens` is out of bounds"),
        ({"text": {"format": {"type": "json_schema"}}}, "`text.format` has no JSON schema"),
        ({"tools": [{"type": "movie"}]}, '`tools[0].type` is out of bounds: value "movie"'),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, '`tool_choice.type` "mcp" is not'),
        ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "`tool_choice` is out of bounds"),
        ({"max_tokens": 3}, "`max_tokens` is not a known parameter"),
        *(
            ({"input": [*said(TEXT)["input"], {"type": kind, **fields}]},
             f'`input[1].type` "{kind}" is not supported. Remedy:')
            for kind in SERVERS_ITEMS
            for fields in ({}, {"output": {"type": "x"}, "arguments": {}, "role": "x"})
        ),
        *(
            ({"tools": [*TOOLS, {"type": kind, **fields}]},
             f'`tools[1].type` "{kind}" is not supported. Remedy:')
            for kind in SERVERS_TOOLS
            for fields in ({}, {"name": "x", "tools": TOOLS, "parameters": "x"})
        ),
    ],
)  # fmt: skip
async def test_garbage_is_refused_by_its_name(fields: dict[str, Any], wanted: str) -> None:
    assert wanted in await refused(RESPONSES, body(**fields))
