"""The reader of a model's output and its scope of stop strings, in every tool-call format and however it is cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.each_case import each_case
from tests.unit.api.compat.scripts import chat_answer
from tests.unit.api.fakes import CHAT, StreamingEngine, chat, post
from tests.unit.api.tools.written_calls import written_arguments, written_calls
from tests.workers.properties import REPEATABLE, usually
from vsched.api.tools.arguments import ValueScan, type_name
from vsched.api.tools.formats import (
    CALL_FORMATS,
    CallFormat,
    ValueArguments,
    call_format,
    reasoning_format,
)
from vsched.api.tools.formats import REASONING_FORMATS as FORMATS
from vsched.api.tools.reader import CallStopScope, OutputParser
from vsched.config.sections import ModelConfig

THINK = FORMATS["think"]
TOOLS: dict[str, dict[str, Any]] = {"f": {}, "get_weather": {}}
COMMON = ("hermes", "pythonic", "qwen3-coder", "gemma4", "harmony")
EACH_FORMAT = pytest.mark.parametrize("name", usually(*COMMON, of=CALL_FORMATS))
"""Calls in JSON, Python, tags, a language of values, and channels; the others are variants of these."""
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{", "b": [1, {}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {}]}'


def read(pieces: Iterable[str], name: str = "hermes", **options: Any) -> dict[str, Any]:
    """Message parsed from pieces of a response in a tool-call format."""
    return read_with(CALL_FORMATS[name], pieces, **{"tools": TOOLS, **options})


def read_with(
    known: CallFormat, pieces: Iterable[str], *, cut: bool = False, **options: Any
) -> dict[str, Any]:
    reader = OutputParser(known, **options)
    parts = [part for piece in pieces for part in reader.push(piece)]
    message: dict[str, Any] = {"content": "", "calls": []}
    for kind, text, called in [*parts, *reader.finish(cut=cut)]:
        if kind != "call":
            message[kind] = message.get(kind, "") + text
        elif called:
            message["calls"].append([called, text])
        else:
            message["calls"][-1][1] += text
    return message


ANALYSIS = "<|channel|>analysis<|message|>%s<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f"
CALLED = [["f", "{}"]]
HERMES: list[tuple[str, str, Any]] = [
    ("Hello < there", "Hello < there", []),
    (CALL, "", [["f", ARGUMENTS]]),
    (f"\n{CALL}\n{CALL}\n", "", [["f", ARGUMENTS]] * 2),
    (f"Look.\n{CALL}", "Look.\n", [["f", ARGUMENTS]]),
    (f"{CALL}\n\nDone.", "Done.", [["f", ARGUMENTS]]),
    # Keys in another order, additional keys, and arguments as a string.
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [["f", '{"x":1}']]),
    ('<tool_call>{"name": "f", "arguments": {}, "id": 3}</tool_call>', "", CALLED),
    ('<tool_call>{"id": 1, "name": "f", "parameters": "{}"}', "", CALLED),
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
]
FAMILIES: list[tuple[str, str, str, Any]] = [
    ("llama-json", '{"name": "f", "parameters": {}}', "", CALLED),
    ("llama-json", '\n{"type": "function", "name": "f", "parameters": {"a": 1}}', "",
     [["f", '{"a":1}']]),
    ("llama-json", '{"name": "g", "parameters": {}}', '{"name": "g", "parameters": {}}', []),
    ("llama-json", '{"a": 1}', '{"a": 1}', []),
    ("llama-json", 'I say {"name": "f"', 'I say {"name": "f"', []),
    ("llama-json", '{"name": "f", "parameters": {}}; yes', "; yes", CALLED),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}", "", CALLED),
    ("mistral", "[TOOL_CALLS]" + "f" * 600, "[TOOL_CALLS]" + "f" * 600, []),
    ("mistral-list", '[TOOL_CALLS] [{"arguments": {}, "name": "f", "id": "a"}, no] x', ", no] x",
     CALLED),
    ("mistral-list", '[TOOL_CALLS][{"name": "f", "arguments": {}}], x', ", x", CALLED),
]  # fmt: skip
CUT_BEFORE_A_NAME: list[tuple[str, str, str, str]] = [
    ("hermes", "Look: <tool_", "", "Look: "),
    ("hermes", "a < b", "", "a < b"),
    ("hermes", "\n<tool_call>", "", ""),
    ("hermes", "<tool_call>no", "", "<tool_call>no"),
    ("llama-json", '{"city": "Paris", "na', "", '{"city": "Paris", "na'),
    ("llama-json", '{"name": "Bob", "age": 3', "", '{"name": "Bob", "age": 3'),
    ("llama-json", '{"name": "get', "", ""),
    ("llama-json", '{"type": "function", "name": "f", "para', "", ""),
    ("llama-json", '{"type": "circle", "r', "", '{"type": "circle", "r'),
    ("pythonic", "[1, 2", "", "[1, 2"),
    ("pythonic", "[get_wea", "", ""),
    ("harmony", "<|channel|>final<|message|>Yes<|en", "", "Yes"),
    ("harmony", "<|channel|>comm", "", ""),
    ("harmony", "<|channel|>analysis<|message|>I see<|e", "I see", ""),
]
THINKING: list[tuple[str, bool, str, str, Any]] = [
    ("<think>\nA < b.\n</think>\n\nYes.", False, "A < b.", "Yes.", []),
    ("\n <think>A\n\nB</think>Yes.", False, "A\n\nB", "Yes.", []),
    ("A</think>\n\nYes.", True, "A", "Yes.", []),
    ("<think>A</think>Yes.", True, "A", "Yes.", []),
    ("<think>\n\n</think>\n\nYes.", False, "", "Yes.", []),
    ("Yes <think>no</think>", False, "", "Yes <think>no</think>", []),
    ("<thin", False, "", "<thin", []),
    ("A <b> </thin", True, "A <b> </thin", "", []),
    ("A \n", True, "A", "", []),
    ("\n\nYes.", False, "", "\n\nYes.", []),
    ("  ", False, "", "  ", []),
    (f"I call.\n</think>\n\n{CALL}", True, "I call.", "", [["f", ARGUMENTS]]),
]
CHANNELS: list[tuple[str, str, str, str, Any]] = [
    ("harmony", ANALYSIS % "A < b." + "<|channel|>final<|message|>Yes.", "A < b.", "Yes.", []),
    ("harmony", ANALYSIS % "A." + TO_F + ' json<|message|>{"a": 1}', "A.", "",
     [["f", '{"a": 1}']]),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + ANALYSIS % "B."
     + TO_F + " <|constrain|>json<|message|>{}", "B.", "I look.", CALLED),
    ("harmony", "<|channel|>final<|message|>Yes.", "", "Yes.", []),
    ("gemma4", "<|channel>thought\nA.\n<channel|>Yes.", "A.", "Yes.", []),
    ("gemma4", "<|channel>thought\n<channel|><|tool_call>call:f{}<tool_call|>", "", "", CALLED),
]  # fmt: skip


@each_case(
    ("name", "answer", "reasoning", "content", "calls", "options"),
    [
        *(("hermes", answer, "", content, calls, {}) for answer, content, calls in HERMES),
        *((name, answer, "", content, calls, {}) for name, answer, content, calls in FAMILIES),
        *(
            (name, answer, thought, content, [], {"cut": True, "reasoning": FORMATS.get(name)})
            for name, answer, thought, content in CUT_BEFORE_A_NAME
        ),
        *(
            ("hermes", answer, thought, content, calls, {"reasoning": THINK, "thinking": thinking})
            for answer, thinking, thought, content, calls in THINKING
        ),
        *((*each, {"reasoning": FORMATS[each[0]]}) for each in CHANNELS),
    ],
)
def test_reader_parts_reasoning_content_and_calls_and_loses_nothing(
    name: str, answer: str, reasoning: str, content: str, calls: Any, options: dict[str, Any]
) -> None:
    """Calls that are cut before their name are left out."""
    for pieces in ([answer], list(answer)):
        found = {"reasoning": "", **read(pieces, name, **options)}
        assert found == {"reasoning": reasoning, "content": content, "calls": calls}


@settings(REPEATABLE, max_examples=60)
@given(st.sampled_from(sorted(CALL_FORMATS)), st.data())
def test_reader_finds_the_same_in_every_form_however_it_is_cut(name: str, data: Any) -> None:
    """Damaged responses, too: text outside of calls is kept."""
    known = CALL_FORMATS[name]
    marks = [known.opening, known.first, known.before, known.middle, known.after, known.closing]
    marks += [
        *(known.between, *known.openings),
        *(msgspec.structs.astuple(known.arguments)[:3] if known.arguments else ()),
        written_calls(known, [("f", {}), ("f", {"a": "x", "b": [1, True]})]),
        written_arguments(known, {"a": "x"}),
        *("f", '{"a": 1}', "{", "}", '"', "text", "\n", ";", "f(a="),
        *("<think>", "</think>", "<", " "),
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


@each_case(
    ("name", "steps"),
    [
        ("hermes", [
            ('<tool_call>\n{"name": "f", "arguments": ', []),
            ('{"a', [("call", "", "f"), ("call", '{"a', "")]),
            ('": 1', [("call", '": 1', "")]),
            ("}}", [("call", "}", "")]),
            ("\n</tool_call>", []),
        ]),
        ("hermes", [("One <", [("content", "One ", "")]), ("b>", [("content", "<b>", "")])]),
        ("llama-json", [('{"city', []), ('": "Paris', [("content", '{"city": "Paris', "")])]),
    ],
)  # fmt: skip
def test_reader_holds_back_no_more_than_may_become_a_call(name: str, steps: list[Any]) -> None:
    reader = OutputParser(CALL_FORMATS[name], tools=TOOLS)
    for text, parts in steps:
        assert reader.push(text) == parts
    assert reader.finish() == []


@each_case("name", ["deepseek", "deepseek-v3.1"])
@each_case("forced", [False, True])
def test_reader_shows_no_markup_of_a_call_cut_within_a_character(name: str, forced: bool) -> None:
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


@EACH_FORMAT
@each_case("cut", [False, True])
def test_scope_parts_every_form_and_loses_nothing(name: str, cut: bool) -> None:
    known = CALL_FORMATS[name]
    lead = "I look." if known.opening else ""
    answer = lead + written_calls(known, CALLS[:1] if known.alone else CALLS)
    for end in (len(answer), len(lead) + 25, len(lead) + 5):
        scope = CallStopScope(known, tools=TOOLS, reasoning=FORMATS.get(name))
        parts = split(scope, answer[:end], cut=cut)
        assert "".join(text for text, _ in parts) == answer[:end]
        counted = "".join(text for text, counts in parts if counts)
        if cut or end == len(answer):
            assert counted == lead


def test_scope_counts_no_half_character_of_markup() -> None:
    scope = CallStopScope(CALL_FORMATS["deepseek"], tools=TOOLS)
    assert split(scope, "<｜tool\ufffd", cut=True)[-1] == ("<｜tool\ufffd", False)


def test_scope_has_no_part_for_a_possible_call() -> None:
    scope = CallStopScope(CALL_FORMATS["hermes"], tools=TOOLS)
    assert scope.split("a <tool") == [("a ", True)]
    assert scope.split("box>") == [("<toolbox>", True)]


LOOK_AND_CALL = [("text", "Look."), ("call", "f", json.dumps(CALLS[0][1]))]


@each_case(
    ("stop", "parts"),
    [
        *((stop, LOOK_AND_CALL) for stop in ("}", "a", "<", ".<")),  # `.<` spans text and call
        ("k", [("text", "Loo")]),
        (".", [("text", "Look")]),
        ("D", LOOK_AND_CALL),
    ],
)
@each_case("choice", ["auto", "none"])
async def test_stop_strings_count_outside_calls(stop: str, parts: list[Any], choice: str) -> None:
    """Without tools, they count everywhere."""
    engine = StreamingEngine()
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = chat(tools=tools, stop=[stop], tool_choice=choice)
    sending = asyncio.create_task(post(engine, CHAT, body))
    await engine.entered.wait()
    call = written_calls(CALL_FORMATS["hermes"], CALLS[:1])
    engine.push(f"Look.{call}\n" + ("Done." if stop == "D" else ""))
    engine.finish()
    found = chat_answer(await sending, stream=False).parts
    if choice == "auto":
        assert (found, engine.stopped) == (parts, stop in {"k", ".", "D"})
    else:
        assert found == [("text", f"Look.{call}\n".partition(stop)[0])]


@each_case(
    ("template", "calls", "reasoning"),
    [
        ('{%- if tools %}<tools></tools> <tool_call>\\n{\\"name\\": <function-name>',
         "hermes", None),
        ("<tool_call>\n<function=example>", None, None),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3-coder", None),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>", "glm", None),
        ("<minimax:tool_call>", "minimax", None),
        ('<|tool_call>call:{{ name }}{k:<|"|>v<|"|>}', "gemma4", None),
        ("to=functions.{{ name }}<|channel|>commentary json", "harmony", None),
        ("Put it in the format of [func_name1(params_name1=params_value1...), func_name2(params)]",
         "pythonic", None),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}```json", "deepseek", None),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}", "deepseek-v3.1", None),
        ('{{ "[TOOL_CALLS]" + name + "[ARGS]" }}', "mistral", None),
        ('{{ "[TOOL_CALLS] [" }}', "mistral-list", None),
        ('Respond in the format {"name": function name, "parameters": dictionary',
         "llama-json", None),
        ("{{ tools }}", None, None),
        ("", None, None),
        ("x</think>", None, "think"),
        ("[THINK]", None, "mistral"),
        ("<|channel>thought", None, "gemma4"),
        ("<|channel|>analysis", None, "harmony"),
        ("<|user|>x<|end|>", None, None),
    ],
)  # fmt: skip
def test_the_template_reports_the_form_of_calls_and_of_reasoning(
    template: str, calls: str | None, reasoning: str | None
) -> None:
    assert call_format("auto", template) == (CALL_FORMATS[calls] if calls else None)
    found = reasoning_format("auto", template)
    assert found == (FORMATS[reasoning] if reasoning else None)
    assert reasoning_format("none", template) is None


def test_settings_name_every_form() -> None:
    """The configuration is a layer below the API and cannot read its table."""
    hints = get_type_hints(ModelConfig)
    assert set(get_args(hints["tool_format"])) == {"auto", *CALL_FORMATS}
    assert set(get_args(hints["reasoning_format"])) == {"auto", "none", *FORMATS}
    assert msgspec.convert({"tool_format": "hermes"}, ModelConfig).tool_format == "hermes"


NASTY = [
    "", "\"", "'", "\\", "\\n", "it's \"so\"", "\n", "\n\n x \n", "}", "])", "a, b=1", "<", "</", "None",
    "12", "日本 é 😀", "f(a=1)", "{\"a\": 1}", "<tool", "x\x00\x1f", "\u2028", '"""', "''",
]  # fmt: skip
MARKS = ("</parameter>", "</arg_value>", '<|"|>')
TEXTS = st.sampled_from(NASTY) | st.text(max_size=8).filter(
    lambda text: not any(mark in text for mark in MARKS)
)
KEYS = st.sampled_from(["a", "b_2", "city", "x-y", "größe"])
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    LEAVES | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
MANY_CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "get_weather"]), st.dictionaries(KEYS, VALUES, max_size=4)),
    min_size=1,
    max_size=3,
)


def schemas(calls: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Function schemas that these calls match."""
    found: dict[str, dict[str, Any]] = {"f": {}, "get_weather": {}}
    for name, arguments in calls:
        for key, value in arguments.items():
            held = found[name].setdefault("properties", {}).setdefault(key, {"type": []})
            held["type"].append(type_name(value))
    return found


def pieces(text: str, cuts: Sequence[int]) -> Iterator[str]:
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return (text[start:end] for start, end in pairwise(ends))


def consistent(calls: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Return True if each argument of a function is always of one type: a text in tags carries no type."""
    found = schemas(calls).values()
    kinds = [each["type"] for known in found for each in known.get("properties", {}).values()]
    return all(len(set(types)) == 1 for types in kinds)


@settings(REPEATABLE, max_examples=40)
@given(
    st.sampled_from(sorted(CALL_FORMATS)),
    MANY_CALLS.filter(consistent),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_written_calls_are_parsed_however_the_stream_is_cut(
    name: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    known = CALL_FORMATS[name]
    calls = calls[:1] if known.alone else calls
    answer = written_calls(known, calls)
    for parts in (pieces(answer, cuts), list(answer)):
        message = read(parts, name, tools=schemas(calls))
        found = [(called, json.loads(text)) for called, text in message["calls"]]
        assert found == calls
        assert message["content"] == ""
        if known.arguments is None:  # JSON is passed on unchanged
            texts = [written_arguments(known, arguments) for _, arguments in calls]
            assert [text for _, text in message["calls"]] == texts


CUT = [
    ("get_weather", {"city": "São Paulo, 'SP'", "n": -12.5, "yes": True, "no": None, "free": "x"}),
    ("f", {"many": [1, {"k": ["v", False]}], "any": 17}),
]


@EACH_FORMAT
@each_case("forced", [False, True])
def test_cut_calls_return_their_text_without_markup(name: str, forced: bool) -> None:
    """At every letter, streaming or not; partial arguments are a prefix of the complete ones."""
    known = CALL_FORMATS[name]
    calls = CUT[:1] if known.alone else CUT
    tools = schemas(calls)
    for untyped in ("free", "any"):
        for each in tools.values():
            each.get("properties", {}).pop(untyped, None)
    answer = written_calls(known, calls)
    options: dict[str, Any] = {"tools": tools, "forced": forced, "cut": True}
    whole = read([answer], name, **options)["calls"]
    assert [(called, json.loads(text)) for called, text in whole] == calls
    started: set[str] = set()
    for end in range(len(answer)):
        message = read([answer[:end]], name, **options)
        assert read([answer[: end // 2], answer[end // 2 : end]], name, **options) == message
        assert message["content"] == ""
        for (called, text), (wanted, full) in zip(message["calls"], whole, strict=False):
            assert called == wanted
            assert full.startswith(text)
        started.add("".join(text for _, text in message["calls"]))
    partial = {"pythonic": 1, "gemma4": 1, "qwen3-coder": 4, "glm": 4, "minimax": 4}
    assert len(started) > partial.get(name, 20)


@each_case("name", ["pythonic", "gemma4"])
def test_each_piece_of_an_argument_is_read_once(name: str) -> None:
    """Closing brackets within a text would otherwise make the time quadratic."""
    form = CALL_FORMATS[name].arguments
    assert isinstance(form, ValueArguments)
    scan, quote = ValueScan(form), (form.raw_quotes or form.quotes)[0]
    text = f"a{form.assign}{quote}"
    places: list[int] = []
    for _ in range(50):
        text += "x" * 100 + form.closing
        assert scan.scan_piece(text) == (0, "", False)
        places.append(scan.sought)
    assert all(len(text) // 50 * index < place for index, place in enumerate(places))
    text += quote + form.closing + " "
    assert json.loads(scan.scan_piece(text)[1])["a"] == 50 * ("x" * 100 + form.closing)


@EACH_FORMAT
def test_a_free_answer_that_ends_by_itself_loses_nothing(name: str) -> None:
    """A possible beginning of a call is content, unless calls are forced."""
    known = CALL_FORMATS[name]
    answer = written_calls(known, CUT[:1])
    for end in range(len(answer)):
        message = read([answer[:end]], name, tools=schemas(CUT))
        assert message["content"] == ("" if message["calls"] else answer[:end])
        forced = read([answer[:end]], name, tools=schemas(CUT), forced=True)
        assert forced["content"] == ""


@each_case(
    ("name", "answer", "content", "calls"),
    [
        ("pythonic", "[f()]", "", [("f", {})]),
        ("pythonic", "[f(a='it\\'s', b=\"x\"), f(a=[1, (2, 3),], b={'k': None,},)]", "",
            [("f", {"a": "it's", "b": "x"}), ("f", {"a": [1, [2, 3]], "b": {"k": None}})]),
        ("pythonic", "[f(a=1_000, b=.5, c=0x10, d=-3, e=word, g=true)]", "",
            [("f", {"a": 1000, "b": 0.5, "c": 16, "d": -3, "e": "word", "g": True})]),
        ("pythonic", "[f(a='\\x41\\u00e9\\U0001F600\\d')]", "", [("f", {"a": "Aé😀\\d"})]),
        ("pythonic", """[f(a=\"\"\"x"y\"\"\", b="")]""", "", [("f", {"a": 'x"y', "b": ""})]),
        ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
        ("pythonic", "[g(a=1)]", "[g(a=1)]", []),
        ("pythonic", "[f(1)]", "[f(1)]", []),
        ("pythonic", "See [f(a=1)]", "See [f(a=1)]", []),
        ("qwen3-coder", "I look.\n<tool_call>\n<function=f>\n</function>\n</tool_call>", "I look.\n",
            [("f", {})]),
        ("qwen3-coder",
            "<tool_call><function=f><parameter=a>1</parameter><parameter=n>2</parameter></function>", "",
            [("f", {"a": "1", "n": 2})]),
        ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=n>\nmany\n</parameter>\n</function>", "",
            [("f", {"n": "many"})]),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>\nx\n</arg_value></tool_call>", "",
            [("f", {"a": "\nx\n"})]),
        ("glm", "<tool_call>f\n<arg_key>u</arg_key>\n<arg_value>True</arg_value>\n</tool_call>", "",
            [("f", {"u": True})]),
        ("glm", "<tool_call>f\n<arg_key>m</arg_key>\n<arg_value>5</arg_value>\n</tool_call>", "",
            [("f", {"m": "5"})]),
        ("glm", "<tool_call>f\n<arg_key>m</arg_key>\n<arg_value>null</arg_value>\n</tool_call>", "",
            [("f", {"m": None})]),
        ("glm", "<tool_call>f</tool_call>", "", [("f", {})]),
        ("glm", "<tool_call>f <b>", "<tool_call>f <b>", []),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x "y"<|"|>,l:[1,<|"|>z<|"|>],o:{k:true}}<tool_call|>', "",
            [("f", {"a": 'x "y"', "l": [1, "z"], "o": {"k": True}})]),
        ("gemma4", '<|tool_call>call:f{"a": "x", b: New York}<tool_call|>', "",
            [("f", {"a": "x", "b": "New York"})]),
        ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}', "",
            [("f", {"a": 1})]),
        ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', "", [("f", {"a": 1})]),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{}', "", [("f", {})]),
    ],
)  # fmt: skip
def test_models_variants_are_parsed(name: str, answer: str, content: str, calls: list[Any]) -> None:
    properties = {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
    tools = {"f": {"properties": properties}} if name in {"qwen3-coder", "glm"} else {"f": {}}
    for parts in ([answer], list(answer)):
        message = read(parts, name, tools=tools)
        assert [(called, json.loads(text)) for called, text in message["calls"]] == calls
        assert message["content"] == content
