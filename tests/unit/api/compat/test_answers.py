"""Text, reasoning and tool calls are the same in every API, streaming or not, and also if they are cut."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from tests.each_case import each_case
from tests.unit.api.compat.scripts import (
    CALLS,
    Answer,
    chat_answer,
    messages_answer,
    named_events,
    responses_answer,
    saying,
)
from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from tests.unit.api.tools.written_calls import written_calls
from tests.unit.media.fakes import model_info
from vsched.aio.streams import OutputDelta
from vsched.api.bodies import SMALL_BYTES
from vsched.api.tools.formats import CALL_FORMATS
from vsched.errors import RequestFailed

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
APIS: dict[str, tuple[Any, dict[str, Any], object]] = {
    CHAT: (chat_answer, chat(tools=[{"type": "function", "function": FUNCTION}]), "required"),
    RESPONSES: (
        responses_answer,
        {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
        "required",
    ),
    MESSAGES: (messages_answer, chat(max_tokens=9, tools=[TOOL]), {"type": "any"}),
}
"""Reader of replies, body with a function, and the choice that forces a call."""
LOOK = [("text", "Look."), ("call", "f", '{"a": 1}'), ("call", "f", '{"b": "ü"}')]


async def answer(
    path: str, engine: FakeEngine, *, stream: bool, forced: bool = False, **settings: Any
) -> Answer:
    read, body, choice = APIS[path]
    sent = {**body, "stream": stream} | ({"tool_choice": choice} if forced else {})
    found: Answer = read(await post(engine, path, sent, **settings), stream=stream)
    return found


@each_case("path", APIS)
@each_case("stream", [False, True])
@each_case("size", [1, 7, 500])
async def test_text_and_calls(path: str, size: int, stream: bool) -> None:
    found = await answer(path, saying(CALLS, size=size), stream=stream)
    assert found == Answer(LOOK, "tool_calls")


@each_case("path", [RESPONSES, MESSAGES])
@each_case("stream", [False, True])
@each_case("size", [1, 7, 30, 500])
async def test_text_after_a_call_stays_there(path: str, size: int, stream: bool) -> None:
    """Also if one delta has the end of the arguments and the text."""
    found = await answer(path, saying(f"{CALLS}\nDone.", size=size), stream=stream)
    assert found.parts == [*LOOK, ("text", "Done.")]


@each_case("path", APIS)
@each_case("stream", [False, True])
async def test_thoughts_come_first(path: str, stream: bool) -> None:
    engine = saying("<think>hm</think>yes", "length", size=3)
    found = await answer(path, engine, stream=stream, reasoning_format="think")
    assert found == Answer([("reasoning", "hm"), ("text", "yes")], "length")


ARGUMENTS = '{"a": "b"}'
ANSWER = written_calls(CALL_FORMATS["hermes"], [("f", {"a": "b"})])
AT = ANSWER.index(ARGUMENTS)


@each_case("path", APIS)
@each_case("stream", [False, True])
async def test_a_forced_call_that_is_cut_shows_no_markup(path: str, stream: bool) -> None:
    for end in (8, AT - 1, AT, AT + 5, len(ANSWER) - 9):
        engine = saying(ANSWER[:end], "length", size=1)
        found = await answer(path, engine, stream=stream, forced=True)
        written = ANSWER[AT : min(end, AT + len(ARGUMENTS))]
        assert found == Answer([("call", "f", written)] if written else [], "length")
    whole = await answer(path, saying(ANSWER, size=1), stream=stream, forced=True)
    assert whole == Answer([("call", "f", ARGUMENTS)], "tool_calls")


@each_case("stream", [False, True])
async def test_half_an_object_is_no_call_that_ended(stream: bool) -> None:
    """A stop token within the arguments, or a model that gives up."""
    engine = saying(ANSWER[: AT + 5], "stop")
    found = await answer(CHAT, engine, stream=stream, forced=True)
    assert found == Answer([("call", "f", '{"a":')], "stop")


async def test_streams_of_calls_have_no_event_for_markup() -> None:
    """The role, then the call: clients show nothing for a dozen events with empty content."""
    body = {**APIS[CHAT][1], "tool_choice": "required", "stream": True}
    reply = await post(saying(ANSWER, size=1), CHAT, body)
    first, *calls, last = [event["choices"][0]["delta"] for event in reply.events]
    assert (first, last) == ({"role": "assistant"}, {})
    assert len(calls) == len(ARGUMENTS)
    assert all(set(each) == {"tool_calls"} for each in calls)


@each_case("fields", [{"logprobs": True}, {"return_token_ids": True}])
async def test_streams_of_calls_lose_no_token_that_was_requested(fields: dict[str, Any]) -> None:
    engine = saying(ANSWER, size=1)
    if "logprobs" in fields:
        deltas = [delta for delta in engine.script if isinstance(delta, OutputDelta)]
        engine.script = [msgspec.structs.replace(delta, logprobs=[]) for delta in deltas]
    body = {**APIS[CHAT][1], "tool_choice": "required", "stream": True, **fields}
    assert len((await post(engine, CHAT, body)).events) == len(ANSWER) + 1


LOST = {"code": "group_lost", "message": "lost"}


@each_case("path", [RESPONSES, MESSAGES])
async def test_a_stream_that_fails_ends_with_an_error_event(path: str) -> None:
    """Clients of /v1/responses wait for `response.failed`, and find the reason there."""
    engine = FakeEngine(OutputDelta("a", [1]), RequestFailed("lost", code="group_lost"))
    events = named_events(await post(engine, path, {**APIS[path][1], "stream": True}))
    if path == MESSAGES:
        assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "lost"}}
        return
    assert events[-2] == {"type": "error", **LOST, "param": None, "sequence_number": 5}
    failed = {**events[0]["response"], "status": "failed", "error": LOST}
    assert events[-1] == {"type": "response.failed", "response": failed, "sequence_number": 6}


LARGE = "data:video/mp4;base64," + base64.b64encode(bytes(SMALL_BYTES)).decode()
VIDEO = {"type": "video_url", "video_url": {"url": LARGE}, "fps": 1}
FRAMES = {"type": "video", "video": ["data:,a", "data:,b"], "fps": 2}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [FRAMES]}


@each_case(
    ("path", "name", "content"),
    [(RESPONSES, "input", [VIDEO, FRAMES]), (MESSAGES, "messages", [VIDEO, RESULT])],
)
async def test_videos_are_parts_as_in_chats(path: str, name: str, content: list[Any]) -> None:
    """An extension: with their options, large or not, in order, also as a result of a tool."""
    engine = FakeEngine()
    engine.preprocessor.info = model_info(video_token_id=2)
    body = {**APIS[path][1], name: [{"role": "user", "content": content}]}
    assert (await post(engine, path, body)).status == 200
    found = [(video.source, video.sampling.fps) for video in engine.calls[0]["images"]]
    assert found == [(LARGE, 1), (("data:,a", "data:,b"), 2)]
