"""Several choices in one reply: for several prompts, several for each, the best of some, and how they end together."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, PLAIN, Client, FakeEngine, body_of, post
from vsched.aio.streams import OutputDelta, TokenLogprob
from vsched.api import ApiSettings, create_app
from vsched.errors import RequestFailed, RequestRefused


def said(text: str, logprob: float | None = None) -> list[OutputDelta | Exception | asyncio.Event]:
    token = ord(text[0])
    logprobs = None if logprob is None else [TokenLogprob(token, logprob, [])]
    return [OutputDelta(text, [token], logprobs, "stop")]


def engine_saying(*texts: str) -> FakeEngine:
    engine = FakeEngine(*said(texts[0]))
    engine.scripts = {str(index): said(text) for index, text in enumerate(texts) if index}
    return engine


def text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str(choice["message" if "message" in choice else "delta"]["content"])


@each_case("path", [CHAT, PLAIN])
async def test_n_answers_are_one_request_and_choices_of_one_reply(path: str) -> None:
    engine = engine_saying("a", "b", "c")
    reply = await post(engine, path, body_of(path, n=3, seed=5))
    assert [(one["index"], text_of(one)) for one in reply.json["choices"]] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]
    (call,) = engine.calls
    name = reply.json["id"]
    assert call["request_ids"] == [name, f"{name}#1", f"{name}#2"]
    assert call["sampling"].seed == 5
    assert reply.headers["x-request-id"] == name


@each_case("prompts", [["x", "y", "z"], [[1, 2], [3], [4, 5, 6]]])
async def test_each_prompt_of_a_list_is_a_request_and_choices_follow_the_prompts(
    prompts: list[Any],
) -> None:
    engine = engine_saying(*"abcdef")
    reply = await post(engine, PLAIN, {"prompt": prompts, "n": 2})
    assert [call["prompt"] for call in engine.calls] == prompts
    assert [(one["index"], one["text"]) for one in reply.json["choices"]] == list(
        enumerate("abcdef")
    )
    assert reply.json["usage"]["prompt_tokens"] == 21
    assert reply.json["usage"]["completion_tokens"] == 6


@each_case(
    ("fields", "param"),
    [
        ({"n": 7}, "n"),
        ({"prompt": ["x"] * 7}, "prompt"),
        ({"prompt": ["x", "y"], "n": 4}, "n"),
        ({"best_of": 7}, "best_of"),
    ],
)
async def test_more_answers_than_allowed_are_refused(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    reply = await post(engine, PLAIN, {"prompt": "x", **fields}, ApiSettings(choices_max=6))
    assert (reply.status, reply.error["param"]) == (400, param)
    assert "limit 6 answers. Remedy: " in reply.error["message"]
    assert not engine.calls


@each_case("path", [CHAT, PLAIN])
async def test_streams_of_answers_have_their_indices_and_one_end(path: str) -> None:
    engine = FakeEngine(OutputDelta("a", [1]), OutputDelta("A", [2], None, "stop"))
    engine.scripts = {"1": [OutputDelta("b", [1]), OutputDelta("B", [2], None, "length")]}
    options = {"include_usage": True}
    reply = await post(engine, path, body_of(path, n=2, stream=True, stream_options=options))
    *events, last = reply.events
    texts = {0: "", 1: ""}
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += text_of(choice)
    assert texts == {0: "aA", 1: "bB"}
    ends = {
        choice["index"]: choice["finish_reason"]
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"]
    }
    assert ends == {0: "stop", 1: "length"}
    assert len({event["id"] for event in reply.events}) == 1
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (7, 4)
    if path == CHAT:
        roles = [event["choices"][0]["delta"].get("role") for event in events]
        assert roles == ["assistant", None, "assistant", None]


@each_case("stream", [False, True])
async def test_failure_of_one_ends_all(stream: bool) -> None:
    never = asyncio.Event()
    engine = FakeEngine(OutputDelta("a", [1]), OutputDelta("A", [2], None, "stop"))
    engine.scripts = {"1": [RequestFailed("lost")], "2": [never]}
    reply = await post(engine, PLAIN, body_of(PLAIN, n=3, stream=stream))
    if stream:
        assert [event for event in reply.events if "error" in event] == [reply.events[-1]]
        assert reply.events[-1]["error"]["message"] == "lost"
    else:
        assert (reply.status, reply.error["message"]) == (500, "lost")
    assert [one.aborted for one in engine.generations] == [1, 1, 1]


async def test_refusal_of_a_later_prompt_ends_the_earlier_ones() -> None:
    class Refusing(FakeEngine):
        async def generate_choices(self, **call: Any) -> Any:
            if len(self.calls) == 2:
                self.refusal = RequestRefused("too many wait", code="queue_full", status=429)
            return await super().generate_choices(**call)

    engine = Refusing()
    reply = await post(engine, PLAIN, {"prompt": ["x", "y", "z"], "n": 2})
    assert (reply.status, reply.error["message"]) == (429, "too many wait")
    assert [one.aborted for one in engine.generations] == [1, 1, 1, 1]


async def test_a_client_that_leaves_ends_all_answers() -> None:
    engine = FakeEngine(asyncio.Event())
    engine.scripts = {"1": [asyncio.Event()]}
    client = Client(create_app(engine, ApiSettings()))
    sending = asyncio.create_task(client.send("POST", PLAIN, body_of(PLAIN, n=2, stream=True)))
    await engine.entered.wait()
    await asyncio.sleep(0)
    await engine.generations[1].waiting.wait()
    client.leave()
    await sending
    assert [one.aborted for one in engine.generations] == [1, 1]


async def test_best_of_returns_the_likeliest_and_hides_its_logprobs() -> None:
    engine = FakeEngine(*said("a", -3.0))
    engine.scripts = {"1": said("b", -1.0), "2": said("c", -2.0)}
    reply = await post(engine, PLAIN, body_of(PLAIN, n=2, best_of=3))
    choices = reply.json["choices"]
    assert [(one["index"], one["text"], one["logprobs"]) for one in choices] == [
        (0, "b", None),
        (1, "c", None),
    ]
    assert engine.sampling.logprobs == 0
    assert reply.json["usage"]["completion_tokens"] == 3


async def test_best_of_goes_by_the_mean_of_all_tokens() -> None:
    """Otherwise short choices would win."""
    likely = [TokenLogprob(1, -1.0, [])]
    engine = FakeEngine(OutputDelta("a", [1], likely), OutputDelta("A", [1], likely, "stop"))
    engine.scripts = {"1": said("b", -1.5)}
    reply = await post(engine, PLAIN, body_of(PLAIN, best_of=2, logprobs=0))
    (choice,) = reply.json["choices"]
    assert choice["text"] == "aA"
    assert choice["logprobs"]["token_logprobs"] == [-1.0, -1.0]


@each_case("fields", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}])
async def test_best_of_is_refused_if_there_is_no_choice(fields: dict[str, Any]) -> None:
    reply = await post(FakeEngine(), PLAIN, body_of(PLAIN, **fields))
    assert (reply.status, reply.error["param"]) == (400, "best_of")
    assert "Remedy: " in reply.error["message"]


async def test_best_of_equal_to_n_may_stream() -> None:
    reply = await post(engine_saying("a", "b"), PLAIN, body_of(PLAIN, n=2, best_of=2, stream=True))
    assert sorted(event["choices"][0]["text"] for event in reply.events) == ["a", "b"]
