"""Fields of responses other than text, streaming and not, of both endpoints."""

from __future__ import annotations

import asyncio
import codecs
import re
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, PLAIN, FakeEngine, FakeGeneration, body_of, choices_of, post
from vsched.aio.streams import OutputDelta, PromptReport, TokenLogprob
from vsched.wire import PromptPiece


@each_case("path", [CHAT, PLAIN])
async def test_token_ids_come_as_requested(path: str) -> None:
    """Those of the prompt with the first event; unrequested ones are null, as in vLLM, or left out of events."""

    async def events(**fields: Any) -> list[dict[str, Any]]:
        reply = await post(FakeEngine(), path, body_of(path, **fields))
        return list(reply.events) if fields.get("stream") else [reply.json]

    def of_prompt(reply: dict[str, Any], name: str = "prompt_token_ids") -> Any:
        return (reply if path == CHAT else reply["choices"][0]).get(name)

    prompt = FakeGeneration((), "").prompt_token_ids
    (whole,) = await events(return_token_ids=True)
    assert whole["choices"][0]["token_ids"] == [72, 101, 108, 108, 111]
    assert of_prompt(whole) == prompt
    streamed = await events(return_token_ids=True, stream=True)
    found = [event["choices"][0]["token_ids"] for event in streamed]
    assert found == [[72, 101, 108], [108], [111]]
    assert [of_prompt(event) for event in streamed] == [prompt, None, None]
    (plain,) = await events()
    assert plain["choices"][0]["token_ids"] is None
    assert (of_prompt(plain), of_prompt(plain, "prompt_logprobs")) == (None, None)
    assert "token_ids" not in str(await events(stream=True))


def spelled(token_id: int) -> bytes:
    return b"<s>" if token_id >= 300 else bytes([token_id])


def logprob(token_id: int, value: float, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token_id, value, list(top))


AS_IDS = logprob(255, -0.5, (255, -0.5), (254, -1.0))
ALIKE = logprob(97, -3.0, (0xE2, -1.0), (0xC3, -2.0), (97, -3.0), (301, -4.0), (300, -5.0))


@each_case("stream", [False, True])
@each_case(
    ("path", "fields", "reported", "found"),
    [
        # `logprobs: 0` asks for the sampled token alone; halves of characters do not hide each other.
        (PLAIN, {"logprobs": 0},
         [logprob(72, -0.5), logprob(105, -3.0, (254, -1.0), (255, -2.0))],
         [{"H": -0.5}, {"i": -3.0, "bytes:\\xfe": -1.0, "bytes:\\xff": -2.0}]),
        # As in vLLM: the first entry is the sampled token, even if another was more likely.
        (PLAIN, {"logprobs": 2}, [logprob(65, -2.0, (66, -0.1), (67, -1.0))],
         [{"A": -2.0, "B": -0.1, "C": -1.0}]),
        # Incomplete characters as bytes, as in OpenAI's API, and duplicates as ids.
        (PLAIN, {"logprobs": 5}, [ALIKE],
         [{"a": -3.0, "bytes:\\xe2": -1.0, "bytes:\\xc3": -2.0, "<s>": -4.0,
           "token_id:300": -5.0}]),
        (CHAT, {"logprobs": True, "top_logprobs": 5}, [ALIKE],
         [[("a", -3.0, [97]), ("bytes:\\xe2", -1.0, [0xE2]), ("bytes:\\xc3", -2.0, [0xC3]),
           ("a", -3.0, [97]), ("<s>", -4.0, [*b"<s>"]), ("<s>", -5.0, [*b"<s>"])]]),
        (CHAT, {"logprobs": True}, [logprob(72, -0.5), logprob(105, -1)],
         [[("H", -0.5, [72])], [("i", -1.0, [105])]]),
        (CHAT, {"logprobs": True, "top_logprobs": 1}, [logprob(72, -0.5, (255, float("-inf")))],
         [[("H", -0.5, [72]), ("bytes:\\xff", -9999.0, [255])]]),
        # For tokens that are no text by themselves.
        (PLAIN, {"logprobs": 2, "return_tokens_as_token_ids": True}, [AS_IDS],
         [{"token_id:255": -0.5, "token_id:254": -1.0}]),
        (CHAT, {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}, [AS_IDS],
         [[("token_id:255", -0.5, [255]), ("token_id:255", -0.5, [255]),
           ("token_id:254", -1.0, [254])]]),
    ],
)  # fmt: skip
async def test_logprobs_are_of_the_sampled_token_and_of_its_alternatives(
    path: str, fields: dict[str, Any], reported: list[TokenLogprob], found: Any, stream: bool
) -> None:
    """In completions as a table that begins with the token, in chats as the token and a list."""
    *others, last = [OutputDelta("", [one.token_id], [one]) for one in reported]
    engine = FakeEngine(*others, msgspec.structs.replace(last, finish_reason="stop"))
    engine.preprocessor.token_bytes = spelled  # type: ignore[method-assign]
    reply = await post(engine, path, body_of(path, stream=stream, **fields))
    logprobs = [choice["logprobs"] for choice in choices_of(reply, stream=stream)]
    if path == PLAIN:
        tops = [top for each in logprobs for top in each["top_logprobs"]]
        assert [list(top.items()) for top in tops] == [list(top.items()) for top in found]
        tokens = [token for each in logprobs for token in each["tokens"]]
        assert tokens == [next(iter(top)) for top in found]
        assert engine.sampling.logprobs == fields["logprobs"]
    else:
        rows = [(row, *row["top_logprobs"]) for each in logprobs for row in each["content"]]
        assert found == [
            [(one["token"], one["logprob"], one["bytes"]) for one in row] for row in rows
        ]
        assert engine.sampling.logprobs == fields.get("top_logprobs", 0)


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
    engine = engine_of_halves([300, *TEXT.encode(), 300, ord("d")], size=size)
    reply = await post(engine, PLAIN, {"prompt": "x", "logprobs": 0, "stream": stream})
    choices = choices_of(reply, stream=stream)
    text = "".join(choice["text"] for choice in choices)
    tokens = [each for choice in choices for each in choice["logprobs"]["tokens"]]
    offsets = [each for choice in choices for each in choice["logprobs"]["text_offset"]]
    assert text == TEXT + "d"
    assert tokens[1:4] == ["a", "bytes:\\xe2", "bytes:\\x80"]
    assert offsets == [0, 0, *[1] * 3, 2, *[3] * 4, 4, 5, 5]


async def test_offsets_of_a_stop_string_s_tokens_are_within_the_text() -> None:
    reported = [TokenLogprob(ord(letter), -1.0, []) for letter in "abcd"]
    engine = FakeEngine(OutputDelta("a", [ord("a")] * 4, reported, "stop"))
    reply = await post(engine, PLAIN, {"prompt": "x", "logprobs": 0})
    assert reply.json["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 1]


@each_case("path", [CHAT, PLAIN])
async def test_usage_with_every_event(path: str) -> None:
    """Only with `include_usage`, as in vLLM; the last event has only the usage."""

    async def streamed(settings: dict[str, Any], **options: bool) -> list[dict[str, Any]]:
        body = body_of(path, stream=True, stream_options=options or None)
        return list((await post(FakeEngine(), path, body, **settings)).events)

    events = await streamed({}, include_usage=True, continuous_usage_stats=True)
    usages = [event["usage"] for event in events]
    counted = [(usage["completion_tokens"], usage["total_tokens"]) for usage in usages]
    assert counted == [(3, 10), (4, 11), (5, 12), (5, 12)]
    assert [len(event["choices"]) for event in events] == [1, 1, 1, 0]
    assert "usage" not in str(await streamed({}, continuous_usage_stats=True))
    for options in ({"continuous_usage_stats": True}, {}):
        reported = await streamed({"usage_always": True}, **options)
        assert [event["usage"] for event in reported] == usages


PROMPT = [72, 105, 33]
"""The bytes of `Hi!`."""


class TellingEngine(FakeEngine):
    """Reports every prompt, always the same, with two alternatives per token."""

    async def generate_choices(self, **call: Any) -> list[FakeGeneration]:
        generations = await super().generate_choices(**call)
        report = PromptReport(PROMPT, 2)
        ids, top = [[105, 104], [63, 46]], [[-0.5, -1.0], [-0.25, -2.0]]
        report.add_piece(
            PromptPiece(
                number=1,
                start=1,
                logprobs=np.array([-0.5, -3.0], np.float32).tobytes(),
                ranks=np.array([1, 7], np.int32).tobytes(),
                top_ids=np.array(ids, np.int32).tobytes(),
                top_logprobs=np.array(top, np.float32).tobytes(),
            )
        )
        for one in generations:
            one.prompt_token_ids = PROMPT
            if call["sampling"].prompt_logprobs is not None:
                one.prompt_report = report
        return generations


def telling() -> TellingEngine:
    last = [TokenLogprob(97, -0.125, [(97, -0.125), (98, -4.0)])]
    return TellingEngine(OutputDelta("a", [97], last, "length"))


ECHOED: dict[str, list[Any]] = {
    "tokens": ["H", "i", "!", "a"],
    "token_logprobs": [None, -0.5, -3.0, -0.125],
    "top_logprobs": [None, {"i": -0.5}, {"?": -0.25, "!": -3.0}, {"a": -0.125, "b": -4.0}],
    "text_offset": [0, 1, 2, 3],
}
IN_VLLMS_FORM = [
    None,
    {"105": {"logprob": -0.5, "rank": 1, "decoded_token": "i"}},
    {
        "63": {"logprob": -0.25, "rank": 1, "decoded_token": "?"},
        "33": {"logprob": -3.0, "rank": 7, "decoded_token": "!"},
    },
]


@each_case("stream", [False, True])
@each_case(("prompt", "text"), [("Hi there", "Hi there"), (PROMPT, "Hi!")])
async def test_echo_has_the_prompt_and_its_logprobs(prompt: Any, text: str, stream: bool) -> None:
    """The text as it was sent, even if the tokens spell it differently."""
    engine = telling()
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream}
    (choice,) = choices_of(await post(engine, PLAIN, body), stream=stream)
    assert choice["text"] == text + "a"
    assert choice["logprobs"] == {**ECHOED, "text_offset": [0, 1, 2, len(text)]}
    assert choice.get("prompt_logprobs") is None
    assert engine.sampling.prompt_logprobs == 1


async def test_echo_of_several_answers_reports_the_prompt_before_each_in_a_stream() -> None:
    engine = telling()
    engine.scripts = {"1": [OutputDelta("b", [98], [TokenLogprob(98, -4.0, [])], "length")]}
    body = {"prompt": "Hi", "echo": True, "logprobs": 1, "n": 2, "stream": True}
    events = (await post(engine, PLAIN, body)).events
    choices = {event["choices"][0]["index"]: event["choices"][0] for event in events}
    assert [choices[index]["text"] for index in (0, 1)] == ["Hia", "Hib"]
    assert choices[0]["logprobs"] == {**ECHOED, "text_offset": [0, 1, 2, 2]}
    assert choices[1]["logprobs"]["tokens"] == ["H", "i", "!", "b"]


async def test_echo_of_tokens_shows_special_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the offsets of the tokens would not match the text."""
    engine = FakeEngine(OutputDelta("a", [97], None, "stop"))
    monkeypatch.setattr(engine.preprocessor, "detokenize", lambda _: "Hi")
    monkeypatch.setattr(engine.preprocessor, "token_bytes", lambda one: f"<{one}>".encode())
    reply = await post(engine, PLAIN, {"prompt": [1], "echo": True})
    assert reply.json["choices"][0]["text"] == "<3><1><4><1><5><9><2>a"


async def test_echo_reports_each_choice_its_own_prompt() -> None:
    reply = await post(FakeEngine(), PLAIN, {"prompt": ["x", "y"], "echo": True, "n": 2})
    texts = [one["text"] for one in reply.json["choices"]]
    assert texts == ["xHello", "xHello", "yHello", "yHello"]


@each_case("path", [CHAT, PLAIN])
@each_case("inline_max", [3, 1000])
async def test_prompt_logprobs_in_vllm_s_form(
    path: str, inline_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long reports are worded off the loop."""
    monkeypatch.setattr("vsched.api.choices._INLINE_VALUES_MAX", inline_max)
    engine = telling()
    reply = (await post(engine, path, body_of(path, prompt_logprobs=1))).json
    holder = reply if path == CHAT else reply["choices"][0]
    assert holder["prompt_logprobs"] == IN_VLLMS_FORM
    assert (engine.sampling.prompt_logprobs, engine.sampling.logprobs) == (1, None)


@each_case("path", [CHAT, PLAIN])
@each_case(
    ("stream", "inline_max", "inline"),
    [(False, 7, False), (False, 8, True), (True, 3, False), (True, 4, True)],
)
async def test_many_log_probabilities_are_worded_off_the_loop(
    path: str, *, stream: bool, inline_max: int, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all choices, or of an event, count, with their alternatives."""
    monkeypatch.setattr("vsched.api.choices._INLINE_VALUES_MAX", inline_max)
    token = TokenLogprob(97, -0.125, [(98, -4.0)])
    engine = FakeEngine(OutputDelta("aa", [97, 97], [token, token], "length"))
    spell, threads = engine.preprocessor.token_bytes, set[threading.Thread]()

    def token_bytes(token_id: int) -> bytes:
        threads.add(threading.current_thread())
        return spell(token_id)

    monkeypatch.setattr(engine.preprocessor, "token_bytes", token_bytes)
    asked = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    assert (await post(engine, path, body_of(path, n=2, stream=stream, **asked))).status == 200
    assert (threads == {threading.current_thread()}) == inline


@each_case("fields", [{"n": 3}, {"prompt": ["Hi"] * 3}, {"n": 1, "best_of": 3}])
async def test_prompt_logprobs_of_all_choices_count(fields: dict[str, Any]) -> None:
    """A request gets them once for each of its prompts and choices, and best_of only for those returned."""
    body = {"prompt": "Hi", "prompt_logprobs": 2, **fields}
    values = len(PROMPT) * 3
    assert (await post(telling(), PLAIN, body, prompt_logprobs_max=3 * values)).status == 200
    engine = telling()
    reply = await post(engine, PLAIN, body, prompt_logprobs_max=3 * values - 1)
    if "best_of" in fields:
        assert reply.status == 200
        return
    assert (reply.status, reply.error["code"]) == (400, "too_many_logprobs")
    limits = rf"value {3 * values}, limit {3 * values - 1}\. .*server\.prompt_logprobs_max"
    assert re.search(limits, reply.error["message"])
    assert all(one.aborted for one in engine.generations)


async def test_prompt_logprobs_and_echo_have_their_own_counts() -> None:
    engine = telling()
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "prompt_logprobs": 0}
    (choice,) = (await post(engine, PLAIN, body)).json["choices"]
    assert choice["logprobs"]["top_logprobs"][:3] == ECHOED["top_logprobs"][:3]
    reported = [list(one) if one else None for one in choice["prompt_logprobs"]]
    assert reported == [None, ["105"], ["33"]]


async def test_nothing_is_generated_with_max_tokens_0() -> None:
    engine = FakeEngine(OutputDelta("", [], None, "length"))
    reply = await post(engine, PLAIN, {"prompt": "Hi", "echo": True, "max_tokens": 0})
    assert reply.json["choices"][0]["text"] == "Hi"
    assert engine.sampling.prompt_only
    await post(engine, PLAIN, {"prompt": "Hi", "max_tokens": 1})
    assert (engine.sampling.prompt_only, engine.sampling.max_tokens) == (False, 1)


def said(role: str, content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": content}]}


@each_case("stream", [False, True])
@each_case(
    ("path", "fields", "echoed"),
    [
        (PLAIN, {"prompt": "Hi"}, "Hi"),
        (CHAT, said("assistant", "An apple"), "An apple"),
        (CHAT, said("assistant", [{"type": "text", "text": "An apple"}]), "An apple"),
        (CHAT, said("user", "An apple"), ""),
    ],
)
async def test_echo_reports_the_prompt_or_the_message_that_goes_on_once(
    path: str, fields: dict[str, Any], echoed: str, stream: bool
) -> None:
    """Before the output, without log-probabilities; the user's message is not repeated."""
    engine = FakeEngine(OutputDelta(" a", [97]), OutputDelta(" day", [98], None, "stop"))
    reply = await post(engine, path, body_of(path, **fields, echo=True, stream=stream))
    choices = choices_of(reply, stream=stream)
    kind = "delta" if stream else "message"
    texts = [one["text"] if path == PLAIN else one[kind]["content"] for one in choices]
    assert texts == ([echoed + " a", " day"] if stream else [echoed + " a day"])
    assert {one.get("logprobs") for one in choices} == {None}
    assert engine.sampling.prompt_logprobs is None
