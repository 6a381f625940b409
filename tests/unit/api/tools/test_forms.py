"""Tool calls in the formats of model families, written and parsed: any arguments, cut anywhere in the stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.each_case import each_case
from tests.unit.api.tools.test_reader import read_with
from tests.unit.api.tools.written_calls import written_arguments, written_calls
from vsched.api.tools.arguments import ValueScan, type_name
from vsched.api.tools.formats import CALL_FORMATS, REASONING_FORMATS, ValueArguments

REPEATABLE = settings(derandomize=True, database=None, deadline=None, max_examples=60)
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
CALLS = st.lists(
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
    CALLS.filter(consistent),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_written_calls_are_parsed_however_the_stream_is_cut(
    name: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    known = CALL_FORMATS[name]
    calls = calls[:1] if known.alone else calls
    answer = written_calls(known, calls)
    for parts in (pieces(answer, cuts), list(answer)):
        message = read_with(known, parts, tools=schemas(calls))
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


@each_case("forced", [False, True])
@each_case("name", CALL_FORMATS)
def test_calls_that_are_cut_say_what_there_was_and_no_markup(name: str, forced: bool) -> None:
    """At every letter, streaming or not; partial arguments are a prefix of the complete ones."""
    known = CALL_FORMATS[name]
    calls = CUT[:1] if known.alone else CUT
    tools = schemas(calls)
    for untyped in ("free", "any"):
        for each in tools.values():
            each.get("properties", {}).pop(untyped, None)
    answer = written_calls(known, calls)
    options: dict[str, Any] = {"tools": tools, "forced": forced, "cut": True}
    whole = read_with(known, [answer], **options)["calls"]
    assert [(called, json.loads(text)) for called, text in whole] == calls
    started: set[str] = set()
    for end in range(len(answer)):
        message = read_with(known, [answer[:end]], **options)
        assert read_with(known, [answer[: end // 2], answer[end // 2 : end]], **options) == message
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
        assert scan.take(text) == (0, "", False)
        places.append(scan.sought)
    assert all(len(text) // 50 * index < place for index, place in enumerate(places))
    text += quote + form.closing + " "
    assert json.loads(scan.take(text)[1])["a"] == 50 * ("x" * 100 + form.closing)


@each_case("name", CALL_FORMATS)
def test_a_free_answer_that_ends_by_itself_loses_nothing(name: str) -> None:
    """A possible beginning of a call is content, unless calls are forced."""
    known = CALL_FORMATS[name]
    answer = written_calls(known, CUT[:1])
    for end in range(len(answer)):
        message = read_with(known, [answer[:end]], tools=schemas(CUT))
        assert message["content"] == ("" if message["calls"] else answer[:end])
        forced = read_with(known, [answer[:end]], tools=schemas(CUT), forced=True)
        assert forced["content"] == ""


@each_case(
    ("name", "answer", "content"),
    [
        ("hermes", "Look: <tool_", "Look: "),
        ("hermes", "a < b", "a < b"),
        ("hermes", "\n<tool_call>", ""),
        ("hermes", "<tool_call>no", "<tool_call>no"),
        ("llama-json", '{"city": "Paris", "na', '{"city": "Paris", "na'),
        ("llama-json", '{"name": "Bob", "age": 3', '{"name": "Bob", "age": 3'),
        ("llama-json", '{"name": "get', ""),
        ("llama-json", '{"type": "function", "name": "f", "para', ""),
        ("llama-json", '{"type": "circle", "r', '{"type": "circle", "r'),
        ("pythonic", "[1, 2", "[1, 2"),
        ("pythonic", "[get_wea", ""),
        ("harmony", "<|channel|>final<|message|>Yes<|en", "Yes"),
        ("harmony", "<|channel|>comm", ""),
        ("harmony", "<|channel|>analysis<|message|>I see<|e", ""),
    ],
)
def test_calls_cut_before_their_name_are_left_out(name: str, answer: str, content: str) -> None:
    for parts in ([answer], list(answer)):
        message = read_with(
            CALL_FORMATS[name],
            parts,
            tools={"f": {}, "get_weather": {}},
            cut=True,
            reasoning=REASONING_FORMATS.get(name),
        )
        assert (message["content"], message["calls"]) == (content, [])
        assert message.get("reasoning", "I see") == "I see"


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
def test_variants_that_models_write_are_parsed(
    name: str, answer: str, content: str, calls: list[Any]
) -> None:
    properties = {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
    tools = {"f": {"properties": properties}} if name in {"qwen3-coder", "glm"} else {"f": {}}
    for parts in ([answer], list(answer)):
        message = read_with(CALL_FORMATS[name], parts, tools=tools)
        assert [(called, json.loads(text)) for called, text in message["calls"]] == calls
        assert message["content"] == content


ANALYSIS = "<|channel|>analysis<|message|>%s<|end|><|start|>assistant"


@each_case(
    ("name", "answer", "reasoning", "content", "calls"),
    [
        ("harmony", ANALYSIS % "A < b." + "<|channel|>final<|message|>Yes.", "A < b.", "Yes.", 0),
        ("harmony", ANALYSIS % "A." + '<|channel|>commentary to=functions.f json<|message|>{"a": 1}', "A.", "", 1),
        ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + ANALYSIS % "B."
            + "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "B.", "I look.", 1),
        ("harmony", "<|channel|>final<|message|>Yes.", "", "Yes.", 0),
        ("gemma4", "<|channel>thought\nA.\n<channel|>Yes.", "A.", "Yes.", 0),
        ("gemma4", "<|channel>thought\n<channel|><|tool_call>call:f{}<tool_call|>", "", "", 1),
    ],
)  # fmt: skip
def test_thoughts_and_channels_are_parted_from_content(
    name: str, answer: str, reasoning: str, content: str, calls: int
) -> None:
    for parts in ([answer], list(answer)):
        message = read_with(
            CALL_FORMATS[name], parts, tools={"f": {}}, reasoning=REASONING_FORMATS[name]
        )
        assert message.get("reasoning", "") == reasoning
        assert message["content"] == content
        assert len(message["calls"]) == calls
