"""Fields of responses other than text, streaming and not, of both endpoints."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Sequence
from typing import Any

import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, PLAIN, FakeEngine, body_of, chat, post
from vsched.aio.streams import OutputDelta, TokenLogprob
from vsched.api import ApiSettings

PATHS = pytest.mark.parametrize("path", [CHAT, PLAIN])
PROMPT = [3, 1, 4, 1, 5, 9, 2]


@PATHS
async def test_token_ids_come_as_requested(path: str) -> None:
    """Those of the prompt with the first event; unrequested ones are null, as in vLLM, or left out of events."""

    def in_chat_or_choice(reply: dict[str, Any]) -> dict[str, Any]:
        holder: dict[str, Any] = reply if path == CHAT else reply["choices"][0]
        return holder

    whole = (await post(FakeEngine(), path, body_of(path, return_token_ids=True))).json
    assert whole["choices"][0]["token_ids"] == [72, 101, 108, 108, 111]
    assert in_chat_or_choice(whole)["prompt_token_ids"] == PROMPT
    body = body_of(path, return_token_ids=True, stream=True)
    events = (await post(FakeEngine(), path, body)).events
    found = [event["choices"][0]["token_ids"] for event in events]
    assert found == [[72, 101, 108], [108], [111]]
    prompts = [in_chat_or_choice(event).get("prompt_token_ids") for event in events]
    assert prompts == [PROMPT, None, None]
    plain = (await post(FakeEngine(), path, body_of(path))).json
    assert plain["choices"][0]["token_ids"] is None
    holder = in_chat_or_choice(plain)
    assert (holder["prompt_token_ids"], holder["prompt_logprobs"]) == (None, None)
    streamed = await post(FakeEngine(), path, body_of(path, stream=True))
    assert b"token_ids" not in streamed.body


@PATHS
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_logprobs_as_ids(path: str, stream: bool) -> None:
    """For tokens that are no text by themselves."""
    token = TokenLogprob(255, -0.5, [(255, -0.5), (254, -1.0)])
    engine = FakeEngine(OutputDelta("", [255], [token], "stop"))
    count = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    body = body_of(path, return_tokens_as_token_ids=True, stream=stream, **count)
    reply = await post(engine, path, body)
    (found,) = [
        event["choices"][0]["logprobs"] for event in (reply.events if stream else [reply.json])
    ]
    if path == CHAT:
        first = found["content"][0]
        assert (first["token"], first["bytes"]) == ("token_id:255", [255])
        assert [one["token"] for one in first["top_logprobs"]] == ["token_id:255", "token_id:254"]
    else:
        assert found["tokens"] == ["token_id:255"]
        assert found["top_logprobs"] == [{"token_id:255": -0.5, "token_id:254": -1.0}]


async def test_alternatives_of_a_completion_begin_with_its_token() -> None:
    """As in vLLM: the first entry is the sampled token, even if another was more likely."""
    token = TokenLogprob(65, -2.0, [(66, -0.1), (67, -1.0)])
    reply = await post(
        FakeEngine(OutputDelta("A", [65], [token], "stop")), PLAIN, {"prompt": "x", "logprobs": 2}
    )
    (top,) = reply.json["choices"][0]["logprobs"]["top_logprobs"]
    assert list(top.items()) == [("A", -2.0), ("B", -0.1), ("C", -1.0)]


class Halves:
    """Joins bytes to characters; tokens from 300 on are special ones, which no text shows."""

    def __init__(self, *, special: bool = False) -> None:
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        shown = [one for one in token_ids if self._special or one < 300]
        return self._decoder.decode(b"".join(map(spelled, shown)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def spelled(token_id: int) -> bytes:
    return b"<s>" if token_id >= 300 else bytes([token_id])


TEXT = "a\u2019b\U0001f600c"


def engine_of_halves(token_ids: Sequence[int], *, size: int = 1) -> FakeEngine:
    """An engine whose tokens are the bytes of a text."""
    detokenizer = Halves()
    deltas: list[OutputDelta | Exception | asyncio.Event] = []
    for start in range(0, len(token_ids), size):
        some = list(token_ids[start : start + size])
        reported = [TokenLogprob(one, -1.0, []) for one in some]
        reason = "length" if start + size >= len(token_ids) else None
        deltas.append(OutputDelta(detokenizer.push(some), some, reported, reason))
    engine = FakeEngine(*deltas)
    engine.preprocessor.detokenizer = Halves  # type: ignore[method-assign,assignment]
    engine.preprocessor.token_bytes = spelled  # type: ignore[method-assign]
    return engine


@each_case("stream", [False, True])
@each_case("size", [1, 2, 99])
async def test_offsets_of_tokens_are_those_of_the_text(size: int, stream: bool) -> None:
    """Also for a character of several tokens, and after special tokens."""
    token_ids = [300, *TEXT.encode(), 300, ord("d")]
    engine = engine_of_halves(token_ids, size=size)
    reply = await post(engine, PLAIN, {"prompt": "x", "logprobs": 0, "stream": stream})
    choices = [one["choices"][0] for one in (reply.events if stream else [reply.json])]
    text = "".join(choice["text"] for choice in choices)
    tokens = [each for choice in choices for each in choice["logprobs"]["tokens"]]
    offsets = [each for choice in choices for each in choice["logprobs"]["text_offset"]]
    assert text == TEXT + "d"
    assert tokens[1:4] == ["a", "bytes:\\xe2", "bytes:\\x80"]
    assert offsets == [0, 0, *[1] * 3, 2, *[3] * 4, 4, 5, 5]
    for token, offset in zip(tokens, offsets, strict=True):
        if len(token) == 1:
            assert text[offset] == token


async def test_offsets_of_a_stop_string_s_tokens_are_within_the_text() -> None:
    reported = [TokenLogprob(ord(letter), -1.0, []) for letter in "abcd"]
    engine = FakeEngine(OutputDelta("a", [ord("a")] * 4, reported, "stop"))
    reply = await post(engine, PLAIN, {"prompt": "x", "logprobs": 0})
    assert reply.json["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 1]


async def test_alternatives_that_read_alike_are_all_told() -> None:
    """Incomplete characters as bytes, as in OpenAI's API, and duplicates as ids."""
    top = [(0xE2, -1.0), (0xC3, -2.0), (ord("a"), -3.0), (301, -4.0), (300, -5.0)]
    token = TokenLogprob(ord("a"), -3.0, top)
    engine = FakeEngine(OutputDelta("a", [ord("a")], [token], "stop"))
    engine.preprocessor.token_bytes = spelled  # type: ignore[method-assign]
    reply = await post(engine, PLAIN, {"prompt": "x", "logprobs": 5})
    assert reply.json["choices"][0]["logprobs"]["top_logprobs"] == [
        {"a": -3.0, "bytes:\\xe2": -1.0, "bytes:\\xc3": -2.0, "<s>": -4.0, "token_id:300": -5.0}
    ]
    reply = await post(engine, CHAT, chat(logprobs=True, top_logprobs=5))
    (reported,) = reply.json["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["bytes"]) for one in reported["top_logprobs"][:2]] == [
        ("bytes:\\xe2", [0xE2]),
        ("bytes:\\xc3", [0xC3]),
    ]


@PATHS
async def test_usage_with_every_event(path: str) -> None:
    """Only with `include_usage`, as in vLLM; the last event has only the usage."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (
        await post(FakeEngine(), path, body_of(path, stream=True, stream_options=options))
    ).events
    assert [event["usage"]["completion_tokens"] for event in events] == [3, 4, 5, 5]
    assert [event["usage"]["total_tokens"] for event in events] == [10, 11, 12, 12]
    assert [len(event["choices"]) for event in events] == [1, 1, 1, 0]
    alone = body_of(path, stream=True, stream_options={"continuous_usage_stats": True})
    assert b"usage" not in (await post(FakeEngine(), path, alone)).body
    always = ApiSettings(usage_always=True)
    for body in (alone, body_of(path, stream=True)):
        reported = (await post(FakeEngine(), path, body, always)).events
        assert [event["usage"] for event in reported] == [event["usage"] for event in events]


@PATHS
async def test_text_of_events_is_that_of_the_whole_answer(path: str) -> None:
    """Events of text only are assembled from JSON parts encoded in advance."""
    texts = ["plain", 'a "quote"', "ümlaut\n", "\x00", "\u2028", "}\\"]
    engine = FakeEngine(
        *(OutputDelta(text, [1]) for text in texts), OutputDelta("", [2], None, "stop")
    )
    events = (await post(engine, path, body_of(path, stream=True))).events
    choices = [event["choices"][0] for event in events]
    found = [choice["delta"]["content"] if path == CHAT else choice["text"] for choice in choices]
    assert found == [*texts, ""]
    first, second = ({**event, "choices": None} for event in events[:2])
    assert first == second
    assert choices[1].keys() == choices[2].keys() == choices[-1].keys()
