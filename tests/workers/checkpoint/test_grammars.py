"""Grammars over the tokens of real tokenizers, also of forced calls: allowed outputs, refusals, and limits of work."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.fuzz.schemas import damaged, fits, random_schema
from tests.unit.api.tools.test_reader import read_with
from tests.unit.api.tools.written_calls import written_calls
from tests.workers.checkpoint.draws import TOKENS_MAX, allowed, drawn, drawn_from, encoded
from tests.workers.driver import inspect
from vsched.api.errors import ParameterRefused
from vsched.api.request_schema import FunctionTool
from vsched.api.structured_outputs import constraint_from_schema
from vsched.api.tools.choice import forced_calls
from vsched.api.tools.formats import CALL_FORMATS
from vsched.errors import RequestRefused
from vsched.types import FinishReason, ModelInfo
from vsched_workers.checkpoint import grammars as grammars_module
from vsched_workers.checkpoint.grammars import RECENT_MAX, TokenGrammars, load_grammars
from vsched_workers.checkpoint.tokenize import TokenTable
from vsched_workers.plugin import TRAINED, plugin

TextOf = Callable[[list[int]], str]
TokensOf = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    return inspect(TRAINED)


@pytest.fixture(scope="module")
def grammars(info: ModelInfo) -> TokenGrammars:
    loaded = load_grammars(info)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def text_of(info: ModelInfo) -> TextOf:
    return plugin.load_preprocessor(info).detokenize


@pytest.fixture(scope="module")
def tokens_of(info: ModelInfo) -> TokensOf:
    return functools.partial(plugin.load_preprocessor(info).tokenize, images=False)


def test_matcher_tokenizes_only_the_beginning_of_a_long_forced_text() -> None:
    """The library asks for the tokens of the whole rest at every step: 60,000 characters took 100 ms each time."""
    raw = [*(bytes([byte]) for byte in range(256)), b"", b"xx", b"xxxx"]
    table = TokenTable(raw, raw)
    requested: list[int] = []

    def encode(text: str) -> list[int]:
        requested.append(len(text))
        return [258] * (len(text) // 4) + [ord("x")] * (len(text) % 4)

    grammars = TokenGrammars(table, vocab_size=len(raw), ends=[256], encode=encode)
    matcher = grammars.matcher(encoded(choice=["x" * 9_998]))
    followed = 0
    while matcher.follow(allowed(matcher)) is None:
        assert len(allowed(matcher)) == 1
        followed += 1
    assert not matcher.error
    assert max(requested) <= 64
    assert 2_500 <= followed <= 2_504


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ({"choice": ["a<|im_end|>b"]}, "a<|im_end|>b"),
        ({"regex": r"<\|im_end\|>{2}"}, "<|im_end|>>"),
        ({"grammar": 'start: "<|im_start|>" "<|im_end|>"'}, "<|im_start|><|im_end|>"),
        ({"json_schema": {"const": "<|endoftext|>"}}, '"<|endoftext|>"'),
        ({"json_schema": {"enum": [["<|im_end|>"]]}}, '["<|im_end|>"]'),
    ],
)
def test_matcher_writes_a_literal_of_a_special_token_as_text(
    grammars: TokenGrammars, text_of: TextOf, grammar: dict[str, Any], text: str
) -> None:
    """The special token would end the output there."""
    assert "".join(text_of(drawn(grammars, encoded(**grammar), 0)).split()) == text


@pytest.mark.parametrize("wanted", [[], [5, 6, 7]])
def test_matcher_foresees_forced_tokens_and_follows_nothing(
    grammars: TokenGrammars, text_of: TextOf, wanted: list[int]
) -> None:
    """Each foreseen token and mask is the same as when the matcher follows the tokens."""
    grammar = encoded(regex="[ab]: rather long name (x|y)")
    matcher, follower = (grammars.matcher(grammar) for _ in range(2))
    opening = next(token for token in allowed(matcher) if text_of([token]) == "a")
    for one in (matcher, follower):
        assert one.follow([opening]) is None
    before = matcher.mask.copy()
    found = matcher.foresee(wanted, 8)
    assert text_of([token for token, _ in found]).startswith(": rather")
    assert np.array_equal(matcher.mask, before)
    assert not matcher.error
    for token, mask in found:
        assert allowed(follower) == [token]
        assert follower.follow([token]) is None
        assert np.array_equal(follower.mask, mask)
    assert len(matcher.foresee(wanted, 2)) == 2


def test_matcher_foresees_wanted_tokens_while_they_are_allowed(grammars: TokenGrammars) -> None:
    matcher = grammars.matcher(encoded(regex="[a-c]{2}x"))
    letters = allowed(matcher)[:2]
    assert len(letters) == 2
    assert [token for token, _ in matcher.foresee([letters[0]], 1)] == [letters[0]]
    assert matcher.foresee([], 4) == []
    outside = next(token for token in range(400) if token not in allowed(matcher))
    assert matcher.foresee([outside, letters[0]], 4) == []


POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "k": {"enum": ["a", "b"]},
    },
    "required": ["x", "k"],
    "additionalProperties": False,
}


CALLS: dict[str, Any] = {
    "start": {"many": {"all": ["<tool_call>", {"schema": POINT}, "</tool_call>"]}, "between": "\n"},
    "rules": {},
}


@pytest.mark.parametrize(
    ("answer", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[a-z]{2}"}, r"[0-9]{3}-[a-z]{2}"),
        ({"choice": ["left", 'say "hi"\n', "né 日本"]}, 'left|say "hi"\n|né 日本'),
        ({"grammar": 'start: "yes" | "no" /[0-9]{2}/'}, r"yes|no[0-9]{2}"),
        ({"grammar": '?start: "a" | "b" /[0-9]/'}, r"a|b[0-9]"),
        ({"grammar": '!start: "a" | "b" /[0-9]/'}, r"a|b[0-9]"),
        ({"grammar": 'start[max_tokens=9]: "a" /[0-9]/'}, r"a[0-9]"),
        ({"grammar": 'root ::= "a" | "b" [0-9]'}, r"a|b[0-9]"),
        ({"json_schema": POINT}, r"\{.*\}"),
        ({"calls": CALLS}, r"(<tool_call>.*</tool_call>)+"),
    ],
)
def test_token_grammars_hold_blind_draws_to_texts_also_after_a_thought(
    grammars: TokenGrammars,
    text_of: TextOf,
    tokens_of: TokensOf,
    answer: dict[str, Any],
    pattern: str,
) -> None:
    """A grammar is Lark's unless it has rules of GBNF."""
    for seed in range(3):
        text = text_of(drawn(grammars, encoded(**answer), seed))
        assert re.fullmatch(pattern, text, re.DOTALL), text
    matcher = grammars.matcher(encoded(thought={"end": "</think>", "answer": answer}))
    assert matcher.follow(tokens_of("Any text {\n at all </thin> </think>")) is None
    text = text_of(drawn_from(matcher, 1))
    assert re.fullmatch(rf"(\n\n)?({pattern})", text, re.DOTALL), text


def test_an_output_that_may_go_on_is_ended_by_an_end_token_alone(
    grammars: TokenGrammars, info: ModelInfo
) -> None:
    matcher = grammars.matcher(encoded(regex="a+"))
    ends = set(info.stop_token_ids)
    assert not ends & set(allowed(matcher))
    assert matcher.follow([next(iter(set(allowed(matcher))))]) is None
    assert ends <= set(allowed(matcher))
    assert matcher.follow([info.stop_token_ids[0]]) is FinishReason.STOP


def test_a_repeated_grammar_is_compiled_once_and_its_outputs_are_independent(
    grammars: TokenGrammars, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = encoded(json_schema={"type": "array", "items": {"enum": ["ab", 1]}, "maxItems": 3})
    again = load_grammars(info)
    assert again is not None
    first = [drawn(again, grammar, seed) for seed in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(grammars_module, "_in_its_form", None)  # compiling would fail
        assert [drawn(again, grammar, seed) for seed in range(3)] == first
    for index in range(RECENT_MAX):
        again.matcher(encoded(choice=[f"c{index}"]))
    assert len(again._recent) == RECENT_MAX
    assert grammar not in again._recent


def test_following_again_gives_the_same_mask(grammars: TokenGrammars) -> None:
    """A rank that follows all tokens at once after a loss gets the same result as step by step."""
    grammar = constraint_from_schema(POINT)
    tokens = drawn(grammars, grammar, 3)
    stepwise = grammars.matcher(grammar)
    for count, token in enumerate(tokens[:-1], start=1):
        stepwise.follow([token])
        again = grammars.matcher(grammar)
        again.follow(tokens[:count])
        assert np.array_equal(stepwise.mask, again.mask)


def test_a_token_that_does_not_fit_is_an_error_and_forbids_nothing(grammars: TokenGrammars) -> None:
    matcher = grammars.matcher(encoded(choice=["a"]))
    wrong = next(token for token in range(100) if token not in allowed(matcher))
    assert matcher.follow([wrong]) is FinishReason.ERROR
    assert matcher.mask.all()
    assert matcher.follow([0]) is FinishReason.ERROR


def test_a_grammar_that_becomes_too_complex_ends_its_output(grammars: TokenGrammars) -> None:
    """The limit counts work, so it is reached at the same token everywhere."""
    grammar = encoded(regex="((.{1,500}b?){1,500}c?){1,500}")
    grammars.check(grammar)
    ends = []
    for _ in range(2):
        matcher, rng = grammars.matcher(grammar), random.Random(1)
        for count in range(TOKENS_MAX):
            if reason := matcher.follow([rng.choice(allowed(matcher))]):
                ends.append((count, reason))
                break
    assert ends == [(ends[0][0], FinishReason.ERROR)] * 2
    assert "too many" in matcher.error


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "{",
        "[]",
        "{}",
        encoded(xml="a"),
        encoded(json_schema={"type": "nothing"}),
        encoded(regex="("),
        encoded(regex="(" * 20_000),
        encoded(grammar="start: nowhere"),
        encoded(grammar="root ::= ("),
        encoded(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        encoded(regex=5),
        encoded(choice="ab" * 2 + "\ud800".encode("utf-8", "replace").decode()) + "x",
    ],
)
def test_bad_grammars_are_refused_in_a_sentence(grammars: TokenGrammars, grammar: str) -> None:
    with pytest.raises(RequestRefused, match="cannot be used: .*Remedy") as refusal:
        grammars.check(grammar)
    assert refusal.value.code == "invalid_grammar"
    assert refusal.value.status == 400
    assert "\n" not in refusal.value.message


def test_no_grammars_without_an_end_token(info: ModelInfo) -> None:
    assert load_grammars(msgspec.structs.replace(info, stop_token_ids=())) is None


def test_tokens_beyond_the_model_s_vocabulary_are_never_allowed() -> None:
    raw = [b"a", b"b", b"<end>", b"ab"]
    table = TokenTable(raw, [b"a", b"b", b"", b"ab"])
    small = TokenGrammars(table, vocab_size=3, ends=[2])
    assert allowed(small.matcher(encoded(regex="[ab]{3}"))) == [0, 1]


IN_OTHER_FORMS = [name for name, known in CALL_FORMATS.items() if known.arguments is not None]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["lat"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
EMPTY |= {"additionalProperties": False}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "under": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
    },
    "required": ["value"],
    "additionalProperties": False,
}
REFERRING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/Tree"},
        "name": {"anyOf": [{"type": "string", "pattern": "^[a-z/]{2,4}$"}, {"type": "null"}]},
        "free": {},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": ["tree"],
    "$defs": {"Tree": TREE},
}
TOOLS = {"weather": SCHEMA, "now": EMPTY}
FUNCTIONS = [FunctionTool(name, parameters=schema) for name, schema in TOOLS.items()]
SOME: dict[str, Any] = {"city": "", "days": 0}
WHOLE: dict[str, Any] = {"city": "São 'P'", "unit": "F", "days": 3, "exact": True}
WHOLE |= {"tags": ["a", "é"], "place": {"lat": 4}}
LEAF: dict[str, Any] = {"value": 1}
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("weather", WHOLE),
    ("weather", SOME),
    ("weather", {key: WHOLE[key] for key in list(WHOLE)[:4]}),
    ("weather", {**SOME, "tags": []}),
    ("weather", {**SOME, "place": {"lat": 1}}),
    ("now", {}),
    ("grow", {"tree": {"value": 1, "under": [{"value": 2, "under": [LEAF]}]}, "name": "a/b"}),
    ("grow", {"tree": LEAF, "name": None}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": "x"}),
    ("weather", {"days": 3}),
    ("weather", {**SOME, "days": 100}),
    ("weather", {**SOME, "days": "x"}),
    ("weather", {"city": "x" * 13, "days": 1}),
    ("weather", {"city": "x", "unit": "K", "days": 3}),
    ("weather", {**SOME, "exact": None}),
    ("weather", {**SOME, "tags": ["a", "b", "c"]}),
    ("weather", {**SOME, "place": {}}),
    ("weather", {**SOME, "more": 1}),
    ("grow", {"tree": LEAF, "name": "A"}),
    ("grow", {"tree": {"value": 1, "under": [{}]}}),
    ("grow", {}),
    ("later", {}),
]


def taken(grammars: TokenGrammars, grammar: str, tokens: list[int], ends: set[int]) -> bool:
    """Return whether a grammar accepts these tokens as a complete output."""
    matcher = grammars.matcher(grammar)
    reason = None
    for token in tokens:
        if reason is not None:
            return False
        reason = matcher.follow([token])
    mask = [token for token in ends if matcher.mask[token // 32] >> (token % 32) & 1]
    return reason is FinishReason.STOP or (reason is None and bool(mask))


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_calls_written_in_a_format_match_its_grammar(
    name: str, grammars: TokenGrammars, tokens_of: TokensOf, info: ModelInfo
) -> None:
    """Bounds, missing and further arguments, references and unions."""
    known, ends = CALL_FORMATS[name], set(info.stop_token_ids)
    functions = [*FUNCTIONS, FunctionTool("grow", parameters=REFERRING)]
    several = [("now", {}), ("weather", SOME)]
    grammar, alone = (forced_calls(known, functions, single=one) for one in (False, True))
    grammars.check(grammar)
    assert not taken(grammars, alone, tokens_of(written_calls(known, several)), ends)
    some = [([each], True) for each in ACCEPTED] + [([each], False) for each in REFUSED]
    for calls, fits_it in [*some, (several, not known.alone)]:
        answer = written_calls(known, calls)
        assert taken(grammars, grammar, tokens_of(answer), ends) == fits_it, answer
        assert not taken(grammars, grammar, tokens_of(answer)[:-1], ends), answer


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_blind_draws_of_forced_calls_are_read_as_calls_that_fit(
    name: str, grammars: TokenGrammars, text_of: TextOf
) -> None:
    known = CALL_FORMATS[name]
    for seed in range(3):
        answer = text_of(drawn(grammars, forced_calls(known, FUNCTIONS, single=True), seed))
        for parts in ([answer], list(answer)):
            message = read_with(known, parts, tools=TOOLS)
            assert message["content"] == ""
            ((called, text),) = message["calls"]
            assert fits(msgspec.json.decode(text), {"exact": {}, **TOOLS[called]}), answer


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "boolean"}}}}},
        {"enum": [3, {"a": 1}, None]},
        {"minItems": 2, "minimum": 3, "properties": {"a": {"type": "boolean"}}},
    ],
)
def test_arguments_are_an_object_if_their_schema_has_no_type(
    schema: dict[str, Any], grammars: TokenGrammars, text_of: TextOf
) -> None:
    known = CALL_FORMATS["hermes"]
    grammar = forced_calls(known, [FunctionTool("f", parameters=schema)], single=True)
    for seed in range(4):
        answer = text_of(drawn(grammars, grammar, seed))
        ((_, text),) = read_with(known, [answer], tools={"f": schema})["calls"]
        assert isinstance(msgspec.json.decode(text), dict), answer


UNUSABLE: list[dict[str, Any]] = [
    {"type": "nothing"},
    {"type": "string", "maxLength": "x"},
    {"type": "string", "minLength": 5, "maxLength": 1},
    {"type": "string", "pattern": "("},
    {"type": "array", "items": {"type": "integer"}, "minItems": "x"},
    {"type": "array", "items": {"type": "nothing"}},
]


@pytest.mark.parametrize("name", IN_OTHER_FORMS)
def test_schemas_that_cannot_be_used_are_refused(name: str, grammars: TokenGrammars) -> None:
    """Of one argument, or of all arguments together."""
    for bad in UNUSABLE:
        schema = {"type": "object", "properties": {"a": bad}, "required": ["a"]}
        assert is_refused(grammars, name, schema), bad
    together = FunctionTool("f", parameters={**EMPTY, "anyOf": [{"required": ["a"]}]})
    with pytest.raises(ParameterRefused, match="anyOf.*Remedy"):
        forced_calls(CALL_FORMATS[name], [together], single=True)


def is_refused(grammars: TokenGrammars, name: str, schema: dict[str, Any]) -> bool:
    """Return whether a schema is refused for calls; parsing calls with it must not fail in any case."""
    known = CALL_FORMATS[name]
    read_with(known, [written_calls(known, [("f", {"a": "x"})])], tools={"f": schema})
    try:
        grammars.check(forced_calls(known, [FunctionTool("f", parameters=schema)], single=True))
    except RequestRefused as refusal:
        return "cannot be used: " in refusal.message and "Remedy" in refusal.message
    return False


@pytest.mark.parametrize("name", IN_OTHER_FORMS)
def test_damaged_schemas_of_calls_are_compiled_or_refused(
    name: str, grammars: TokenGrammars
) -> None:
    refused = []
    for seed in range(12):
        rng = random.Random(seed)
        inner = random_schema(rng, 2)
        whole = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
        assert not is_refused(grammars, name, whole), whole
        refused.append(is_refused(grammars, name, damaged(whole, rng)))
    assert set(refused) == {False, True}
