"""Grammars of forced calls in every tool-call format: they accept formatted calls, and their outputs can be parsed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.e2e.random_schemas import damaged, random_schema
from tests.unit.api.tools.test_reader import read_with
from tests.unit.api.tools.written_calls import written_calls
from tests.workers.checkpoint.test_grammars import drawn, fits
from vsched.api.errors import ParameterRefused
from vsched.api.request_schema import FunctionTool
from vsched.api.tools.choice import forced_calls
from vsched.api.tools.formats import CALL_FORMATS
from vsched.errors import RequestRefused
from vsched.types import FinishReason, ModelInfo
from vsched_workers.checkpoint.preprocess.grammars import TokenGrammars, load_grammars
from vsched_workers.plugin import TRAINED, plugin

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
EMPTY: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "required": [],
    "additionalProperties": False,
}
FUNCTIONS = [FunctionTool("weather", parameters=SCHEMA), FunctionTool("now", parameters=EMPTY)]
TOOLS = {"weather": SCHEMA, "now": EMPTY}
WHOLE: dict[str, Any] = {
    "city": "São 'P'",
    "unit": "F",
    "days": 3,
    "exact": True,
    "tags": ["a", "é"],
    "place": {"lat": 4},
}


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    return plugin.inspect(str(TRAINED), dtype="auto", item_tokens_max=0)


@pytest.fixture(scope="module")
def grammars(info: ModelInfo) -> TokenGrammars:
    loaded = load_grammars(info)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def tokens_of(info: ModelInfo) -> Callable[[str], list[int]]:
    front = plugin.load_preprocessor(info)
    return lambda text: front.tokenize(text, images=False)


@pytest.fixture(scope="module")
def text_of(info: ModelInfo) -> Callable[[list[int]], str]:
    return plugin.load_preprocessor(info).detokenize


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


def less(count: int) -> dict[str, Any]:
    return {key: WHOLE[key] for key in list(WHOLE)[:count]}


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_calls_written_in_a_format_match_its_grammar(
    name: str, grammars: TokenGrammars, tokens_of: Callable[[str], list[int]], info: ModelInfo
) -> None:
    known, ends = CALL_FORMATS[name], set(info.stop_token_ids)
    some = {"city": "", "days": 0}
    good: list[list[tuple[str, dict[str, Any]]]] = [
        [("weather", WHOLE)],
        [("weather", some)],
        [("weather", less(4))],
        [("weather", {**some, "tags": []})],
        [("weather", {**some, "place": {"lat": 1}})],
        [("now", {})],
    ]
    several: list[tuple[str, dict[str, Any]]] = [("now", {}), ("weather", some)]
    bad: list[list[tuple[str, dict[str, Any]]]] = [
        [("weather", {"city": "x"})],
        [("weather", {"days": 3})],
        [("weather", {**some, "days": 100})],
        [("weather", {**some, "days": "x"})],
        [("weather", {"city": "x" * 13, "days": 1})],
        [("weather", {"city": "x", "unit": "K", "days": 3})],
        [("weather", {**some, "exact": None})],
        [("weather", {**some, "tags": ["a", "b", "c"]})],
        [("weather", {**some, "place": {}})],
        [("weather", {**some, "more": 1})],
        [("later", {})],
    ]
    grammar = forced_calls(known, FUNCTIONS, single=False)
    grammars.check(grammar)
    (bad if known.alone else good).append(several)
    alone = forced_calls(known, FUNCTIONS, single=True)
    assert not taken(grammars, alone, tokens_of(written_calls(known, several)), ends)
    for calls in good:
        answer = written_calls(known, calls)
        assert taken(grammars, grammar, tokens_of(answer), ends), answer
        assert not taken(grammars, grammar, tokens_of(answer)[:-1], ends), answer
    for calls in bad:
        answer = written_calls(known, calls)
        assert not taken(grammars, grammar, tokens_of(answer), ends), answer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_blind_draws_of_forced_calls_are_read_as_calls_that_fit(
    name: str, seed: int, grammars: TokenGrammars, text_of: Callable[[list[int]], str]
) -> None:
    known = CALL_FORMATS[name]
    tokens, reason = drawn(grammars, forced_calls(known, FUNCTIONS, single=True), seed)
    assert reason is FinishReason.STOP
    answer = text_of(tokens)
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
@pytest.mark.parametrize("seed", range(4))
def test_arguments_are_an_object_if_their_schema_has_no_type(
    schema: dict[str, Any],
    seed: int,
    grammars: TokenGrammars,
    text_of: Callable[[list[int]], str],
) -> None:
    known = CALL_FORMATS["hermes"]
    grammar = forced_calls(known, [FunctionTool("f", parameters=schema)], single=True)
    answer = text_of(drawn(grammars, grammar, seed)[0])
    message = read_with(known, [answer], tools={"f": schema})
    ((_, text),) = message["calls"]
    assert isinstance(msgspec.json.decode(text), dict), answer


REFERRING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/Tree"},
        "name": {"anyOf": [{"type": "string", "pattern": "^[a-z/]{2,4}$"}, {"type": "null"}]},
        "free": {},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": ["tree"],
    "$defs": {
        "Tree": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "under": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("name", IN_OTHER_FORMS)
def test_references_and_unions_are_kept_to(
    name: str, grammars: TokenGrammars, tokens_of: Callable[[str], list[int]], info: ModelInfo
) -> None:
    known, ends = CALL_FORMATS[name], set(info.stop_token_ids)
    grammar = forced_calls(known, [FunctionTool("f", parameters=REFERRING)], single=True)
    tree = {"value": 1, "under": [{"value": 2, "under": [{"value": 3}]}]}

    def fits_it(arguments: dict[str, Any]) -> bool:
        return taken(grammars, grammar, tokens_of(written_calls(known, [("f", arguments)])), ends)

    assert fits_it({"tree": tree})
    assert fits_it({"tree": tree, "name": "a/b"})
    assert fits_it({"tree": {"value": 1}, "name": None})
    assert not fits_it({"tree": {"value": 1}, "name": "A"})
    assert not fits_it({"tree": {"value": 1, "under": [{}]}})
    assert not fits_it({})


@pytest.mark.parametrize("name", IN_OTHER_FORMS)
@pytest.mark.parametrize(
    "bad",
    [
        {"type": "nothing"},
        {"type": "string", "maxLength": "x"},
        {"type": "string", "minLength": 5, "maxLength": 1},
        {"type": "string", "pattern": "("},
        {"type": "array", "items": {"type": "integer"}, "minItems": "x"},
        {"type": "array", "items": {"type": "nothing"}},
    ],
)
def test_schemas_that_cannot_be_used_are_refused(
    name: str, bad: dict[str, Any], grammars: TokenGrammars
) -> None:
    schema = {"type": "object", "properties": {"a": bad}, "required": ["a"]}
    grammar = forced_calls(CALL_FORMATS[name], [FunctionTool("f", parameters=schema)], single=True)
    with pytest.raises(RequestRefused, match="cannot be used: .*Remedy"):
        grammars.check(grammar)


@pytest.mark.parametrize("name", IN_OTHER_FORMS)
def test_constraints_on_all_arguments_together_are_refused(name: str) -> None:
    schema = {"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]}
    with pytest.raises(ParameterRefused, match="anyOf.*Remedy"):
        forced_calls(CALL_FORMATS[name], [FunctionTool("f", parameters=schema)], single=True)


def is_refused(grammars: TokenGrammars, name: str, schema: dict[str, Any]) -> bool:
    """Return whether a schema is refused for calls; parsing calls with it must not fail in any case."""
    known = CALL_FORMATS[name]
    read_with(known, [written_calls(known, [("f", {"a": "x"})])], tools={"f": schema})
    try:
        grammars.check(forced_calls(known, [FunctionTool("f", parameters=schema)], single=True))
    except RequestRefused as refusal:
        return "Remedy" in refusal.message
    return False


@pytest.mark.parametrize("name", IN_OTHER_FORMS)
def test_damaged_schemas_of_calls_are_compiled_or_refused(
    name: str, grammars: TokenGrammars
) -> None:
    refused = []
    for seed in range(60):
        rng = random.Random(seed)
        inner = random_schema(rng, 2)
        whole = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
        assert not is_refused(grammars, name, whole), whole
        refused.append(is_refused(grammars, name, damaged(whole, rng)))
    assert set(refused) == {False, True}
