"""Reports on prompts in responses: echoed text, log-probabilities, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, PLAIN, FakeEngine, FakeGeneration, body_of, chat, post
from vsched.aio.streams import OutputDelta, PromptReport, TokenLogprob
from vsched.api import ApiSettings
from vsched.wire import PromptPiece

PROMPT = [72, 105, 33]
"""The bytes of `Hi!`."""


class TellingEngine(FakeEngine):
    """Reports every prompt, always the same, with two alternatives per token."""

    async def generate_choices(self, **call: Any) -> list[FakeGeneration]:
        generations = await super().generate_choices(**call)
        report = PromptReport(PROMPT, 2)
        ids, top = [[105, 104], [63, 46]], [[-0.5, -1.0], [-0.25, -2.0]]
        report.take(
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
    "top_logprobs": [
        None,
        {"i": -0.5},
        {"?": -0.25, "!": -3.0},
        {"a": -0.125, "b": -4.0},
    ],
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
@each_case("prompt", ["Hi there", PROMPT])
async def test_echo_reports_the_prompt_and_its_log_probabilities(prompt: Any, stream: bool) -> None:
    """The text as it was sent, even if the tokens spell it differently."""
    engine = telling()
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream}
    reply = await post(engine, PLAIN, body)
    (response,) = reply.events if stream else [reply.json]
    (choice,) = response["choices"]
    assert choice["text"] == ("Hi there" if isinstance(prompt, str) else "Hi!") + "a"
    ends = len("Hi there") if isinstance(prompt, str) else len("Hi!")
    assert choice["logprobs"] == {**ECHOED, "text_offset": [0, 1, 2, ends]}
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


@each_case("stream", [False, True])
async def test_echo_without_logprobs_requests_none(stream: bool) -> None:
    engine = FakeEngine(OutputDelta("a", [97]), OutputDelta("b", [98], None, "stop"))
    reply = await post(engine, PLAIN, {"prompt": "Hi", "echo": True, "stream": stream})
    choices = [one["choices"][0] for one in (reply.events if stream else [reply.json])]
    assert [one["text"] for one in choices] == (["Hia", "b"] if stream else ["Hiab"])
    assert {one["logprobs"] for one in choices} == {None}
    assert engine.sampling.prompt_logprobs is None


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
async def test_prompt_logprobs_in_vllm_s_form(path: str) -> None:
    engine = telling()
    fields = {"prompt_logprobs": 1}
    body = body_of(path, **fields)
    reply = (await post(engine, path, body)).json
    holder = reply if path == CHAT else reply["choices"][0]
    assert holder["prompt_logprobs"] == IN_VLLMS_FORM
    assert (engine.sampling.prompt_logprobs, engine.sampling.logprobs) == (1, None)


async def test_prompt_logprobs_and_echo_have_their_own_counts() -> None:
    engine = telling()
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "prompt_logprobs": 0}
    (choice,) = (await post(engine, PLAIN, body)).json["choices"]
    assert choice["logprobs"]["top_logprobs"][:3] == ECHOED["top_logprobs"][:3]
    reported = [list(one) if one else None for one in choice["prompt_logprobs"]]
    assert reported == [None, ["105"], ["33"]]


async def test_nothing_is_generated_with_max_tokens_0() -> None:
    engine = FakeEngine(OutputDelta("", [], None, "length"))
    for _ in range(2):
        reply = await post(engine, PLAIN, {"prompt": "Hi", "echo": True, "max_tokens": 0})
        assert reply.json["choices"][0]["text"] == "Hi"
    assert engine.sampling.prompt_only
    await post(engine, PLAIN, {"prompt": "Hi", "max_tokens": 1})
    assert (engine.sampling.prompt_only, engine.sampling.max_tokens) == (False, 1)


@each_case(
    ("path", "fields", "param"),
    [
        (PLAIN, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        (PLAIN, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (PLAIN, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_unsupported_log_probabilities_are_refused(
    path: str, fields: Any, param: str
) -> None:
    engine = FakeEngine()
    body = body_of(path, **fields)
    reply = await post(engine, path, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert "Remedy: " in reply.error["message"]
    assert not engine.calls


async def test_the_whole_vocabulary_of_a_prompt_within_the_limit() -> None:
    engine = telling()
    body = {"prompt": "x", "prompt_logprobs": -1}
    reply = await post(engine, PLAIN, body, ApiSettings(logprobs_max=256))
    assert engine.sampling.prompt_logprobs == 256
    reported = reply.json["choices"][0]["prompt_logprobs"]
    assert [len(one or ()) for one in reported] == [0, 2, 3]


async def test_long_reports_are_worded_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.api.completions._INLINE_VALUES_MAX", 3)
    reply = await post(telling(), PLAIN, {"prompt": "x", "prompt_logprobs": 1})
    assert reply.json["choices"][0]["prompt_logprobs"] == IN_VLLMS_FORM


@each_case("stream", [False, True])
@each_case(
    ("last", "echoed"),
    [
        ({"role": "assistant", "content": "An apple"}, "An apple"),
        ({"role": "assistant", "content": [{"type": "text", "text": "An apple"}]}, "An apple"),
        ({"role": "user", "content": "An apple"}, ""),
    ],
)
async def test_echo_of_a_chat_reports_the_message_that_goes_on(
    last: dict[str, Any], echoed: str, stream: bool
) -> None:
    """Once, before the output; the user's message is not repeated."""
    engine = FakeEngine(OutputDelta(" a", [97]), OutputDelta(" day", [98], None, "stop"))
    body = chat(echo=True, stream=stream)
    reply = await post(engine, CHAT, {**body, "messages": [*body["messages"], last]})
    kind = "delta" if stream else "message"
    texts = [
        one["choices"][0][kind]["content"] for one in (reply.events if stream else [reply.json])
    ]
    assert texts == ([echoed + " a", " day"] if stream else [echoed + " a day"])
