"""OpenAI's responses: requests become chats; order of events; streaming and non-streaming responses agree."""

from __future__ import annotations

import base64
import math
from typing import Any

import msgspec

from tests.each_case import each_case
from tests.unit.api.compat.scripts import CALLS, named_events, plain, saying
from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from tests.unit.media.fakes import model_info
from vsched.aio.streams import OutputDelta, TokenLogprob
from vsched.api import ApiSettings
from vsched.api.bodies import SMALL_BYTES
from vsched.api.compat.responses import ResponsesRequest, chat_request
from vsched.api.request_schema import ChatRequest
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


URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
TEXT = {"type": "input_text", "text": "See"}


def meant(**fields: Any) -> ChatRequest:
    return chat_request(msgspec.convert(body(**fields), ResponsesRequest))


def test_a_text_with_instructions() -> None:
    assert plain(meant(input="hi", instructions="Be short.")) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
    ]


def test_a_history_of_items() -> None:
    """Items of one turn of the model are merged into one message."""
    request = meant(
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
            {"role": "developer", "content": "Go on."},
        ]
    )  # fmt: skip
    parts = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": URL}]
    messages = plain(request)
    for message in messages:
        calls = message.get("tool_calls", ())
        message["calls"] = [(call["id"], call["function"]["name"]) for call in calls]
        message.pop("tool_calls", None)
    assert messages == [
        {"role": "user", "content": parts, "calls": []},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "calls": [("1", "f"), ("2", "g")],
        },
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
    named = meant(tools=TOOLS, tool_choice={"type": "function", "name": "f"}).tool_choice
    assert msgspec.to_builtins(named)["function"] == {"name": "f"}
    some = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "f"}],
    }
    allowed = msgspec.to_builtins(meant(tools=TOOLS, tool_choice=some).tool_choice)["allowed_tools"]
    assert allowed == {"mode": "required", "tools": [{"function": {"name": "f"}}]}


async def test_fields_without_effect_are_accepted() -> None:
    sent = body(
        store=False, include=["reasoning.encrypted_content"], truncation="disabled",
        reasoning={"effort": "low"}, background=False, previous_response_id=None, user="u",
        stream_options={"include_obfuscation": False}, top_logprobs=0,
        client_metadata={"x": "y"}, access_programs={}, background_options={}, image={},
    )  # fmt: skip
    assert (await post(FakeEngine(), RESPONSES, sent)).status == 200


@each_case("store", [True, False, None])
async def test_store_is_taken_as_in_chats(store: bool | None) -> None:
    """It has no effect on a chat; responses report that nothing is stored."""
    reply = await post(FakeEngine(), RESPONSES, body(store=store))
    assert (reply.status, reply.json["store"]) == (200, False)
    assert (await post(FakeEngine(), CHAT, chat(store=store))).status == 200


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
        (
            {"input": [{"role": "tool", "content": "x"}]},
            "limit system, developer, user or assistant",
        ),
        ({"input": [{"role": "user", "content": [{"type": "movie"}]}]}, "limit input_text,"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "`input[0].content.file_id` is not supported",
        ),
        ({"max_output_tokens": 10**6}, "`max_output_tokens` is out of bounds"),
        ({"text": {"format": {"type": "json_schema"}}}, "`text.format"),
        ({"tools": [{"type": "movie"}]}, '`tools[0].type` is out of bounds: value "movie"'),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, '`tool_choice.type` "mcp" is not'),
        ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "`tool_choice` is out of bounds"),
        ({"max_tokens": 3}, "`max_tokens` is not a known parameter"),
    ],
)
async def test_garbage_is_refused_by_its_name(fields: dict[str, Any], wanted: str) -> None:
    reply = await post(FakeEngine(), RESPONSES, body(**fields))
    assert reply.status == 400
    assert wanted in reply.error["message"]


_ITEMS = "item_reference file_search_call computer_call_output mcp_call custom_tool_call_output"
_TOOLS = "file_search web_search_2025_08_26 mcp code_interpreter custom apply_patch"
"""A few of the names that the product lists."""


@each_case("kind", _ITEMS.split())
@each_case("held", [{}, {"output": {"type": "x"}, "arguments": {}, "role": "x"}])
async def test_items_of_openais_servers_are_refused_by_their_name(
    kind: str, held: dict[str, Any]
) -> None:
    items = [{"role": "user", "content": "x"}, {"type": kind, **held}]
    reply = await post(FakeEngine(), RESPONSES, body(input=items))
    assert reply.status == 400
    assert reply.error["message"].startswith(f'`input[1].type` "{kind}" is not supported. Remedy:')


@each_case("kind", _TOOLS.split())
async def test_tools_of_openai_are_refused_by_their_name(kind: str) -> None:
    tool = {"type": kind, "name": "x", "tools": TOOLS, "parameters": "x"}
    for sent in (tool, {"type": kind}):
        reply = await post(FakeEngine(), RESPONSES, body(tools=[*TOOLS, sent]))
        assert reply.status == 400
        message = reply.error["message"]
        assert message.startswith(f'`tools[1].type` "{kind}" is not supported. Remedy:')


async def test_texts_are_taken_as_chats_have_them() -> None:
    content = [{"type": "text", "text": "a"}]
    assert plain(meant(input=[{"role": "user", "content": content}]))[-1]["content"] == "a"


async def test_videos_are_parts_as_in_chats() -> None:
    """An extension: with their options, large or not, and among images in order."""
    large = base64.b64encode(bytes(range(256)) * (SMALL_BYTES // 256)).decode()
    before = "data:video/mp4;base64,"
    file = {"type": "video_url", "video_url": {"url": before + large}, "fps": 1}
    frames = {"type": "video", "video": [URL, URL], "fps": 2}
    engine = FakeEngine()
    engine.preprocessor.info = model_info(video_token_id=2)
    items = [{"role": "user", "content": [file, IMAGE, frames]}]
    assert (await post(engine, RESPONSES, body(input=items))).status == 200
    video, image, clip = engine.calls[0]["images"]
    assert video.source == before + large
    assert (video.sampling.fps, image.source, clip.source) == (1, URL, (URL, URL))
