"""Stop strings apply to the text of a response, not to its tool calls."""

from __future__ import annotations

from typing import Any

from tests.each_case import each_case
from tests.unit.aio.streams.test_stream import Ended
from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from tests.unit.api.tools.written_calls import written_calls
from tests.unit.media.fakes import FakeDetokenizer
from vsched.aio.streams import ChoiceInputs, TokenStream
from vsched.api.tools.formats import CALL_FORMATS, REASONING_FORMATS
from vsched.api.tools.reader import CallStopScope
from vsched.kernel.commands import Finish, RequestTimes
from vsched.types import FinishReason, SamplingParams

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("f", {"a": "x", "b": [1]}),
    ("get_weather", {"city": "y"}),
]
TOOLS: dict[str, dict[str, Any]] = {"f": {}, "get_weather": {}}


def split(scope: CallStopScope, text: str, *, cut: bool = False) -> list[tuple[str, bool]]:
    parts = [part for letter in text for part in scope.split(letter)]
    return [*parts, *scope.split_rest(cut=cut)]


@each_case("name", CALL_FORMATS)
@each_case("cut", [False, True])
def test_scope_parts_every_form_and_loses_nothing(name: str, cut: bool) -> None:
    known = CALL_FORMATS[name]
    lead = "I look." if known.opening else ""
    answer = lead + written_calls(known, CALLS[:1] if known.alone else CALLS)
    for end in (len(answer), len(lead) + 25, len(lead) + 5):
        scope = CallStopScope(known, tools=TOOLS, reasoning=REASONING_FORMATS.get(name))
        parts = split(scope, answer[:end], cut=cut)
        assert "".join(text for text, _ in parts) == answer[:end]
        counted = "".join(text for text, counts in parts if counts)
        if cut or end == len(answer):
            assert counted == lead


def test_scope_counts_no_half_character_of_markup() -> None:
    scope = CallStopScope(CALL_FORMATS["deepseek"], tools=TOOLS)
    assert split(scope, "<｜tool\ufffd", cut=True)[-1] == ("<｜tool\ufffd", False)


def test_scope_has_no_part_for_what_may_become_a_call() -> None:
    scope = CallStopScope(CALL_FORMATS["hermes"], tools=TOOLS)
    assert scope.split("a <tool") == [("a ", True)]
    assert scope.split("box>") == [("<toolbox>", True)]


@each_case(
    ("stop", "text", "reason"),
    [
        ("}", "Look.{CALL}", "length"),
        ("a", "Look.{CALL}", "length"),
        ("<", "Look.{CALL}", "length"),
        (".<", "Look.{CALL}", "length"),  # one that spans text and call
        ("k", "Loo", "stop"),
        (".", "Look", "stop"),
        ("D", "Look.{CALL}\n", "stop"),
    ],
)
def test_stream_with_a_scope_stops_outside_of_calls_alone(
    stop: str, text: str, reason: str
) -> None:
    known = CALL_FORMATS["hermes"]
    call = written_calls(known, CALLS[:1])
    ended = Ended()
    made = TokenStream(
        ChoiceInputs(
            request_id="r",
            prompt_token_ids=[1],
            sampling=SamplingParams(stop=(stop,)),
            on_stop=ended.on_stop,
            on_end=ended.on_end,
        ),
        lambda **_: FakeDetokenizer(),
        make_stop_scope=lambda: CallStopScope(known, tools=TOOLS),
    )
    answer = f"Look.{call}\n" + ("Done." if stop == "D" else "")
    for letter in answer:
        made.push(ord(letter), None)
    made.finish(Finish("r", 1, FinishReason.LENGTH, RequestTimes()))
    delta = made.take()
    assert delta is not None
    said = text.replace("{CALL}", call)
    assert (delta.text.rstrip("\n"), delta.finish_reason) == (said.rstrip("\n"), reason)
    assert bool(ended.stops) is (reason == "stop")


@each_case("choice", ["auto", "required", "none"])
async def test_requests_with_tools_have_a_scope(choice: str) -> None:
    engine = FakeEngine()
    tools = [{"type": "function", "function": {"name": "f"}}]
    await post(engine, CHAT, chat(tools=tools, tool_choice=choice, stop=["}"]))
    make = engine.calls[0]["make_stop_scope"]
    if choice == "none":
        assert make is None
        return
    call = written_calls(CALL_FORMATS["hermes"], CALLS[:1])
    assert not any(counts for text, counts in split(make(), call) if text)
