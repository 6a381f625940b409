"""If a checkpoint parses its own responses, chats have its reasoning and calls, and no call can be forced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from tests.unit.media.fakes import FakePreprocessor
from vsched.aio.streams import OutputDelta
from vsched.worker.contract import AnswerPart

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class Reads(FakePreprocessor):
    """A checkpoint whose responses are reasoning and calls, a word each."""

    parses_answers = True
    chat_template = "{{ tools }}"
    prompt = ""
    tools: Sequence[Mapping[str, Any]] = ()

    def answer_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> WordParser:
        self.prompt, self.tools = prompt, tools
        return WordParser()


class WordParser:
    def push(self, text: str) -> list[AnswerPart]:
        kinds = {"t": "reasoning", "c": "content"}
        found = []
        for word in text.split():
            if word[0] == "f":
                found.append(AnswerPart("call", "{}", "f"))
            else:
                found.append(AnswerPart(kinds[word[0]], word))  # type: ignore[arg-type]
        return found

    def finish(self) -> list[AnswerPart]:
        return [AnswerPart("content", "!")]


def engine_of(*texts: str) -> FakeEngine:
    deltas = [OutputDelta(text, [1]) for text in texts[:-1]]
    engine = FakeEngine(*deltas, OutputDelta(texts[-1], [1], finish_reason="stop"))
    engine.preprocessor = Reads()
    return engine


@each_case("single", [False, True])
async def test_a_chat_has_what_the_checkpoint_reads(single: bool) -> None:
    engine = engine_of("t1 t2 ", "f f")
    reply = await post(engine, CHAT, chat(tools=TOOLS, parallel_tool_calls=not single))
    (choice,) = reply.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "t1t2"
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "f", "arguments": "{}"}] * (1 if single else 2)
    front = engine.preprocessor
    assert isinstance(front, Reads)
    assert front.prompt
    assert front.tools[0]["function"]["name"] == "f"


async def test_without_tools_reasoning_is_read_as_well() -> None:
    (choice,) = (await post(engine_of("t1 ", "c"), CHAT, chat())).json["choices"]
    assert choice["message"]["reasoning_content"] == "t1"
    assert choice["message"]["content"] == "c!"


async def test_no_call_can_be_forced_in_a_form_that_is_not_known() -> None:
    reply = await post(engine_of("c"), CHAT, chat(tools=TOOLS, tool_choice="required"))
    assert (reply.status, reply.error["code"]) == (400, "tools_not_supported")
