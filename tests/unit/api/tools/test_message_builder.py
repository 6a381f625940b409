"""Tool calls in OpenAI's format, streaming and not, for the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from tests.each_case import each_case
from tests.unit.api.compat.scripts import CALLS, Answer, chat_answer, saying
from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from tests.unit.media.fakes import FakePreprocessor
from vsched.aio.streams import OutputDelta
from vsched.worker.contract import AnswerPart

TOOLS = [{"type": "function", "function": {"name": "f"}}]


async def test_a_whole_answer_with_calls() -> None:
    requested = saying(CALLS)
    (choice,) = (await post(requested, CHAT, chat(tools=TOOLS))).json["choices"]
    message = choice["message"]
    ids = [call.pop("id") for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert message.pop("tool_calls") == [
        {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"type": "function", "function": {"name": "f", "arguments": '{"b": "ü"}'}},
    ]
    assert message == {"role": "assistant", "content": "Look.", "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    shown = "tools=[{'type': 'function', 'function': {'name': 'f'"
    assert requested.calls[0]["prompt"].startswith(shown)


@each_case("stream", [False, True])
async def test_a_single_call_is_the_first(stream: bool) -> None:
    """Further ones are dropped, even one that is incomplete, but not the text."""
    fields = {"tools": TOOLS, "parallel_tool_calls": False, "stream": stream}
    reply = await post(saying(CALLS[:-16]), CHAT, chat(**fields))
    found = chat_answer(reply, stream=stream)
    assert found == Answer([("text", "Look."), ("call", "f", '{"a": 1}')], "tool_calls")


async def test_answers_with_calls_alone_and_without_calls() -> None:
    reply = await post(saying(CALLS.removeprefix("Look.")), CHAT, chat(tools=TOOLS))
    assert reply.json["choices"][0]["message"]["content"] is None
    (choice,) = (await post(saying("Hello"), CHAT, chat(tools=TOOLS))).json["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}


async def test_without_tools_nothing_is_read_as_a_call() -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = (await post(saying(CALLS), CHAT, chat(**fields))).json["choices"][0]
        assert choice["message"]["content"] == CALLS


async def test_a_model_whose_form_is_unknown_takes_no_tools() -> None:
    requested = saying("Hello")
    requested.preprocessor.chat_template = "{{ tools }}"
    reply = await post(requested, CHAT, chat(tools=TOOLS))
    assert (reply.status, reply.error["code"]) == (400, "tools_not_supported")
    assert "model.tool_format" in reply.error["message"]
    reply = await post(requested, CHAT, chat(tools=TOOLS), tool_format="hermes")
    assert reply.status == 200


THOUGHT = "<think>\nLet me see.\n</think>\n\nYes."


def thinking(text: str = THOUGHT) -> FakeEngine:
    """An engine whose template shows how it thinks."""
    made = saying(text)
    made.preprocessor.chat_template = "{{ '<think>' }}"
    return made


async def test_reasoning_is_returned_next_to_the_content() -> None:
    message = (await post(thinking(), CHAT, chat())).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Yes.")
    assert message["reasoning"] == message["reasoning_content"]
    reply = await post(thinking(), CHAT, chat(stream=True))
    parts = chat_answer(reply, stream=True).parts
    assert parts == [("reasoning", "Let me see."), ("text", "Yes.")]
    deltas = [event["choices"][0]["delta"] for event in reply.events]
    assert len([each for each in deltas if each.get("reasoning_content")]) > 1
    assert all(each.get("reasoning_content") == each.get("reasoning") for each in deltas)


async def test_reasoning_is_left_out_unless_wanted() -> None:
    """Each of its tokens still has an event, because clients count them."""
    whole = await post(thinking(), CHAT, chat(include_reasoning=False))
    streamed = await post(thinking(), CHAT, chat(include_reasoning=False, stream=True))
    assert b"reasoning" not in whole.body + streamed.body
    assert whole.json["choices"][0]["message"]["content"] == "Yes."
    deltas = [event["choices"][0]["delta"] for event in streamed.events]
    assert "".join(each["content"] for each in deltas) == "Yes."
    assert len(deltas) == len((await post(thinking(), CHAT, chat(stream=True))).events)


async def test_reasoning_is_content_if_the_settings_say_so() -> None:
    reply = await post(thinking(), CHAT, chat(), reasoning_format="none")
    assert reply.json["choices"][0]["message"]["content"] == THOUGHT


@pytest.mark.parametrize("length", [1, 50_000])
async def test_begun_reasoning_goes_on(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Also for a long prompt, which is rendered later; a grammar constrains the text after the reasoning."""
    requested = thinking("Let me see.</think>Yes.")
    front = requested.preprocessor
    render = front.render
    monkeypatch.setattr(front, "render", lambda *args, **more: render(*args, **more) + "<think>\n")
    messages = [{"role": "user", "content": "x" * length}]
    body = chat(messages=messages, guided_regex="Yes")
    message = (await post(requested, CHAT, body)).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Yes.")
    grammar = msgspec.json.decode(requested.sampling.grammar)
    assert grammar == {"thought": {"end": "</think>", "answer": {"regex": "Yes"}}}


class Reads(FakePreprocessor):
    """A checkpoint that parses its own responses: they are reasoning and calls, a word each."""

    parses_answers = True
    chat_template = "{{ tools }}"
    prompt = ""
    tools: Sequence[Mapping[str, Any]] = ()

    def answer_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> WordParser:
        self.prompt, self.tools = prompt, tools
        return WordParser()


class WordParser:
    def push(self, text: str) -> list[AnswerPart]:
        found = []
        for word in text.split():
            if word[0] == "f":
                found.append(AnswerPart("call", "{}", "f"))
            else:
                found.append(AnswerPart("reasoning" if word[0] == "t" else "content", word))
        return found

    def finish(self) -> list[AnswerPart]:
        return [AnswerPart("content", "!")]


def reading(*texts: str) -> FakeEngine:
    engine = saying("")
    engine.script = [*(OutputDelta(text, [1]) for text in texts), *engine.script]
    engine.preprocessor = Reads()
    return engine


@each_case("single", [False, True])
async def test_a_chat_has_reasoning_text_and_calls_that_the_checkpoint_reads(single: bool) -> None:
    engine = reading("t1 t2 ", "f f")
    reply = await post(engine, CHAT, chat(tools=TOOLS, parallel_tool_calls=not single))
    calls = [("call", "f", "{}")] * (1 if single else 2)
    parts = [("reasoning", "t1t2"), ("text", "!"), *calls]
    assert chat_answer(reply, stream=False) == Answer(parts, "tool_calls")
    front = engine.preprocessor
    assert isinstance(front, Reads)
    assert front.prompt
    assert front.tools[0]["function"]["name"] == "f"


async def test_without_tools_reasoning_is_read_as_well() -> None:
    reply = await post(reading("t1 ", "c"), CHAT, chat())
    assert chat_answer(reply, stream=False).parts == [("reasoning", "t1"), ("text", "c!")]


async def test_no_call_can_be_forced_in_a_form_that_is_not_known() -> None:
    reply = await post(reading("c"), CHAT, chat(tools=TOOLS, tool_choice="required"))
    assert (reply.status, reply.error["code"]) == (400, "tools_not_supported")
