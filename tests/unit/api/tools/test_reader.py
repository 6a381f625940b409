"""The reader of a model's output, and its scope of stop strings: text, but not tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.each_case import each_case
from tests.unit.aio.streams.test_stream import Ended
from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from tests.unit.api.tools.written_calls import written_arguments, written_calls
from tests.unit.media.fakes import FakeDetokenizer
from vsched.aio.streams import ChoiceInputs, TokenStream
from vsched.api.tools.formats import CALL_FORMATS, REASONING_FORMATS, CallFormat
from vsched.api.tools.reader import CallStopScope, OutputParser
from vsched.kernel.commands import Finish, RequestTimes
from vsched.types import FinishReason, SamplingParams

REPEATABLE = settings(derandomize=True, database=None, deadline=None, max_examples=20)
THINK = REASONING_FORMATS["think"]
TOOLS: dict[str, dict[str, Any]] = {"f": {}, "get_weather": {}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{", "b": [1, {}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {}]}'


def read(pieces: Iterable[str], name: str = "hermes", **options: Any) -> dict[str, Any]:
    """Message parsed from pieces of a response in a tool-call format."""
    return read_with(CALL_FORMATS[name], pieces, **{"tools": TOOLS, **options})


def read_with(
    known: CallFormat,
    pieces: Iterable[str],
    *,
    ended: bool = True,
    cut: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Message parsed from pieces of a response: complete, truncated, or unfinished."""
    reader = OutputParser(known, **options)
    parts = [part for piece in pieces for part in reader.push(piece)]
    message: dict[str, Any] = {"content": "", "calls": []}
    for kind, text, called in [*parts, *(reader.finish(cut=cut) if ended else ())]:
        if kind != "call":
            message[kind] = message.get(kind, "") + text
        elif called:
            message["calls"].append([called, text])
        else:
            message["calls"][-1][1] += text
    return message


@each_case(
    ("answer", "content", "calls"),
    [
        ("Hello < there", "Hello < there", []),
        (CALL, "", [["f", ARGUMENTS]]),
        (f"\n{CALL}\n{CALL}\n", "", [["f", ARGUMENTS]] * 2),
        (f"Look.\n{CALL}", "Look.\n", [["f", ARGUMENTS]]),
        (f"{CALL}\n\nDone.", "Done.", [["f", ARGUMENTS]]),
        # Keys in another order, additional keys, and arguments as a string.
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [["f", '{"x":1}']]),
        ('<tool_call>{"name": "f", "arguments": {}, "id": 3}</tool_call>', "", [["f", "{}"]]),
        ('<tool_call>{"id": 1, "name": "f", "parameters": "{}"}', "", [["f", "{}"]]),
        # Cut within the arguments, and within the tag that closes a call.
        ('<tool_call>{"name": "f", "arguments": {"x": "y', "", [["f", '{"x": "y']]),
        (CALL[:-3], "", [["f", ARGUMENTS]]),
        # Text that is no call is content.
        ("<tool_call>f(1)</tool_call> ok", "<tool_call>f(1)</tool_call> ok", []),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        ('<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
        (f"<tool_call>{CALL}", "<tool_call>", [["f", ARGUMENTS]]),
        ("a <tool_ca", "a <tool_ca", []),
        ("  ", "  ", []),
    ],
)
def test_reader_finds_calls_and_loses_nothing(answer: str, content: str, calls: Any) -> None:
    assert read([answer]) == {"content": content, "calls": calls}
    assert read(list(answer)) == {"content": content, "calls": calls}


@settings(REPEATABLE, max_examples=60)
@given(st.sampled_from(sorted(CALL_FORMATS)), st.data())
def test_reader_finds_the_same_in_every_form_however_it_is_cut(name: str, data: Any) -> None:
    """Damaged responses, too: text outside of calls is kept."""
    known = CALL_FORMATS[name]
    marks = [known.opening, known.first, known.before, known.middle, known.after, known.closing]
    marks += [
        known.between,
        "f",
        '{"a": 1}',
        "{",
        "}",
        '"',
        "text",
        "\n",
        ";",
        written_calls(known, [("f", {}), ("f", {"a": "x", "b": [1, True]})]),
        written_arguments(known, {"a": "x"}),
        "f(a=",
        *known.openings,
        *("<think>", "</think>", "<", " "),
        *(msgspec.structs.astuple(known.arguments)[:3] if known.arguments else ()),
    ]
    answer = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=9)))
    cut = data.draw(st.integers(0, len(answer)))
    ways: list[dict[str, Any]] = [{}, {"reasoning": THINK}, {"reasoning": THINK, "thinking": True}]
    for options in ways:
        whole = read([answer], name, **options)
        assert read([answer[:cut], answer[cut:]], name, **options) == whole
        assert read(list(answer), name, **options) == whole
        if not whole["calls"] and not options:
            assert whole["content"] == answer


def test_reader_lets_arguments_out_as_they_come() -> None:
    reader = OutputParser(CALL_FORMATS["hermes"])
    assert reader.push('<tool_call>\n{"name": "f", "arguments": ') == []
    assert reader.push('{"a') == [("call", "", "f"), ("call", '{"a', "")]
    assert reader.push('": 1') == [("call", '": 1', "")]
    assert reader.push("}}") == [("call", "}", "")]
    assert reader.push("\n</tool_call>") == []
    assert reader.finish() == []


def test_reader_holds_back_no_more_than_may_become_a_call() -> None:
    reader = OutputParser(CALL_FORMATS["hermes"])
    assert reader.push("One <") == [("content", "One ", "")]
    assert reader.push("b>") == [("content", "<b>", "")]


@each_case(
    ("answer", "thinking", "reasoning", "content"),
    [
        ("<think>\nA < b.\n</think>\n\nYes.", False, "A < b.", "Yes."),
        ("\n <think>A\n\nB</think>Yes.", False, "A\n\nB", "Yes."),
        ("A</think>\n\nYes.", True, "A", "Yes."),
        ("<think>A</think>Yes.", True, "A", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("<thin", False, "", "<thin"),
        ("A <b> </thin", True, "A <b> </thin", ""),
        ("A \n", True, "A", ""),
        ("\n\nYes.", False, "", "\n\nYes."),
        ("  ", False, "", "  "),
    ],
)
def test_reader_parts_reasoning_from_content(
    answer: str, thinking: bool, reasoning: str, content: str
) -> None:
    wanted = {"reasoning": reasoning, "content": content, "calls": []}
    for pieces in ([answer], list(answer)):
        found = read(pieces, reasoning=THINK, thinking=thinking)
        assert {"reasoning": "", **found} == wanted


def test_reader_finds_calls_behind_reasoning() -> None:
    answer = f"I call.\n</think>\n\n{CALL}"
    for pieces in ([answer], list(answer)):
        found = read(pieces, reasoning=THINK, thinking=True)
        assert found == {"reasoning": "I call.", "content": "", "calls": [["f", ARGUMENTS]]}


@each_case(
    ("name", "answer", "content", "calls"),
    [
        ("llama-json", '{"name": "f", "parameters": {}}', "", [["f", "{}"]]),
        (
            "llama-json",
            '\n{"type": "function", "name": "f", "parameters": {"a": 1}}',
            "",
            [["f", '{"a":1}']],
        ),
        ("llama-json", '{"name": "g", "parameters": {}}', '{"name": "g", "parameters": {}}', []),
        ("llama-json", '{"a": 1}', '{"a": 1}', []),
        ("llama-json", 'I say {"name": "f"', 'I say {"name": "f"', []),
        ("llama-json", '{"name": "f", "parameters": {}}; yes', "; yes", [["f", "{}"]]),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}", "", [["f", "{}"]]),
        ("mistral", "[TOOL_CALLS]" + "f" * 600, "[TOOL_CALLS]" + "f" * 600, []),
        (
            "mistral-list",
            '[TOOL_CALLS] [{"arguments": {}, "name": "f", "id": "a"}, no] x',
            ", no] x",
            [["f", "{}"]],
        ),
        ("mistral-list", '[TOOL_CALLS][{"name": "f", "arguments": {}}], x', ", x", [["f", "{}"]]),
    ],
)
def test_reader_knows_the_forms_of_families(
    name: str, answer: str, content: str, calls: Any
) -> None:
    for pieces in ([answer], list(answer)):
        assert read(pieces, name) == {"content": content, "calls": calls}


def test_an_answer_in_json_is_not_held_back() -> None:
    reader = OutputParser(CALL_FORMATS["llama-json"], tools=TOOLS)
    assert reader.push('{"city') == []
    assert reader.push('": "Paris') == [("content", '{"city": "Paris', "")]


@each_case("name", ["deepseek", "deepseek-v3.1"])
@each_case("forced", [False, True])
def test_reader_shows_no_markup_of_a_call_that_is_cut_within_a_character(
    name: str, forced: bool
) -> None:
    """A tokenizer without tokens for these tags writes their characters in parts."""
    answer = written_calls(CALL_FORMATS[name], [("f", {"a": "x"})])
    for end in (at for at, character in enumerate(answer) if not character.isascii()):
        for pieces in ([*answer[:end], "\ufffd"], [answer[:end] + "\ufffd"]):
            assert read(pieces, name, cut=True, forced=forced)["content"] == ""


def test_reader_keeps_half_characters_of_content() -> None:
    for pieces in (["a \ufffd"], ["a ", "\ufffd"], ["a \ufffd", "\ufffd", "b"]):
        assert read(pieces, cut=True)["content"] == "".join(pieces)
    for pieces in (["a <", "\ufffd", "b"], ["a <\ufffdb"]):
        assert read(pieces, cut=True)["content"] == "a <\ufffdb"
    assert read(["a <", "\ufffd"])["content"] == "a <\ufffd"


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("f", {"a": "x", "b": [1]}),
    ("get_weather", {"city": "y"}),
]


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
