"""JSON schemas: each keyword is enforced exactly by the grammar library, or refused by name."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from vsched.errors import RequestRefused
from vsched.types import FinishReason
from vsched_workers.checkpoint.preprocess.disjoint import longest_chain
from vsched_workers.checkpoint.preprocess.grammars import RULES_MAX, OutputMatcher, TokenGrammars
from vsched_workers.checkpoint.preprocess.schema_numbers import INTEGER_MAX
from vsched_workers.checkpoint.preprocess.schemas import CHAIN_MAX, rewrite_schema
from vsched_workers.checkpoint.tokenize import TokenTable

END = 256
TOKENS_MAX = 200
UUID = "123e4567-e89b-12d3-a456-426614174000"


@pytest.fixture(scope="module")
def grammars() -> TokenGrammars:
    """Grammars over bytes."""
    raw = [bytes([each]) for each in range(END)]
    return TokenGrammars(TokenTable([*raw, b"<end>"], [*raw, b""]), vocab_size=END + 1, ends=[END])


def encoded(**kind: Any) -> str:
    return msgspec.json.encode(kind).decode()


def allowed(matcher: OutputMatcher) -> list[int]:
    return [
        int(each)
        for each in np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))
    ]


def accepts(grammars: TokenGrammars, grammar: str, text: str) -> bool:
    matcher = grammars.matcher(grammar)
    assert not matcher.error, matcher.error
    for at, byte in enumerate(text.encode(), start=1):
        reason = matcher.follow([byte])
        if reason is not None:
            return reason is FinishReason.STOP and at == len(text.encode())
    return END in allowed(matcher)


def draw(grammars: TokenGrammars, schema: Any, rng: random.Random) -> str | None:
    """Return the output of a model with random logits; None if it does not end."""
    matcher, text = grammars.matcher(encoded(json_schema=schema)), bytearray()
    assert not matcher.error, (schema, matcher.error)
    while len(text) < TOKENS_MAX:
        options = [each for each in allowed(matcher) if each not in {32, 10}] or allowed(matcher)
        token = END if END in options and rng.random() < 0.5 else rng.choice(options)
        if token == END:
            return text.decode()
        text.append(token)
        reason = matcher.follow([token])
        assert reason in {None, FinishReason.STOP}, (schema, text, matcher.error)
        if reason is not None:
            return text.decode()
    return None


CAT = {"type": "object", "properties": {"t": {"const": "cat"}, "of": {"$ref": "#"}}}
DOG = {"type": "object", "properties": {"t": {"const": "dog"}}, "required": ["t"]}
INTEGERS = {"type": "object", "additionalProperties": {"type": "integer"}}
ONE, OTHER = (
    {"type": "object", "required": [name], "properties": {name: {}}, "additionalProperties": False}
    for name in "ab"
)
PYDANTIC_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # Integers
        ({"const": 2**60}, [2**60], [2**60 + 1, 2**60 - 1]),
        ({"const": 1e15}, [10**15], [10**15 + 1]),
        ({"const": {"a": [-(2**62)]}}, [{"a": [-(2**62)]}], [{"a": [-(2**62) - 1]}]),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            [0, INTEGER_MAX, -INTEGER_MAX],
            [2**63, -(2**63) - 1],
        ),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, INTEGER_MAX], [-1, 2**64]),
        ({"type": "integer", "format": "uint64", "minimum": 0.0}, [0, 2**64 - 1], [-1]),
        ({"type": "integer", "minimum": 10**18}, [10**18, INTEGER_MAX], [10**18 - 1]),
        ({"type": "integer", "maximum": -(10**18)}, [-(10**18)], [1 - 10**18]),
        ({"type": "integer", "exclusiveMinimum": 2**53}, [2**53 + 2], [2**53, 2**53 + 1]),
        ({"allOf": [{"type": "integer"}, {"exclusiveMinimum": 2**53 + 1}]}, [2**53 + 2], [2**53]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        # Numbers
        ({"type": "number", "minimum": 10**18}, [10**18], [10**18 - 1]),
        ({"type": "number", "maximum": 2**63}, [5, -1.5], [2**63, 2**63 + 1, 9223372036854775001]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.25, 0.5], [0, 0.51]),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, [0.25, 0.5], [0, 0.51]),
        (
            {"type": "number", "minimum": 9217416.858784555, "maximum": 9217417},
            [9217416.86],
            [9217416.8587845545, 9217416.8587845],
        ),
        ({"type": "number", "multipleOf": 0.07}, [0.14, 7, -0.07, 0], [0.1, 1]),
        ({"type": "number", "multipleOf": 0.01}, [0.29, 1.1, 19.99], [0.001]),
        ({"type": "integer", "multipleOf": 0.5}, [3], []),
        ({"type": "integer", "multipleOf": 0.7}, [7, -14], [1, 3]),
        ({"allOf": [{"multipleOf": 6}, {"multipleOf": 4}]}, [12], [6, 4]),
        # Annotations
        *(
            ({"type": "string", "format": name}, ["any text"], [1])
            for name in ("uri-reference", "int64", "byte", "password", "unknown", "regex")
        ),
        ({"type": "integer", "format": "int32"}, [1], ["1"]),
        ({"type": "string", "format": "uuid"}, [UUID], ["x"]),
        ({"type": "string", "format": "time", "pattern": r"^\d\d:\d\d$"}, ["23:59"], ["23:59:59Z"]),
        ({"type": "string", "default": 2**70, "examples": [2**70], "x-a": 1}, ["a"], [1]),
        ({"x-guidance": {"lenient": True}, "type": "integer"}, [1], ["1"]),
        (
            {"type": "object", "properties": {"const": {"type": "null"}, "format": {"enum": [1]}}},
            [{"const": None, "format": 1}],
            [{"const": 1}],
        ),
        # Keywords without effect
        ({"uniqueItems": False, "items": {"type": "integer"}, "type": "array"}, [[1, 1]], [["a"]]),
        ({"uniqueItems": True, "type": "array", "maxItems": 1}, [[1]], [[1, 1]]),
        ({"type": "integer", "not": False, "if": True, "dependentRequired": {}}, [1], ["1"]),
        ({"type": "integer", "then": False, "contains": {}, "minContains": 0}, [1], []),
        ({"type": "string", "maxLength": 2**53 - 1}, ["abc"], [1]),
        ({"type": "string", "maxLength": 2.0}, ["ab"], ["abc"]),
        # Keywords that can be expressed by others
        ({"type": "object", "properties": {"a": {"not": {}}, "b": {}}}, [{"b": 1}], [{"a": 1}]),
        ({**INTEGERS, "propertyNames": {"type": "string"}}, [{"x": 1}], [{"x": "1"}]),
        ({**INTEGERS, "propertyNames": {"enum": ["a", "b"]}}, [{}, {"b": 1}], [{"c": 1}, {"a": "x"}]),
        (
            {**INTEGERS, "propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"const": "a"}}},
            [{"a": 1}],
            [{"b": 1}],
        ),
        (
            {**INTEGERS, "propertyNames": {"minLength": 1, "maxLength": 3}},
            [{"abc": 1}],
            [{"abcd": 1}, {"": 1}],
        ),
        ({**INTEGERS, "propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}]),
        ({**INTEGERS, "propertyNames": {"format": "uuid"}}, [{UUID: 1}], [{"a": 1}]),
        (
            {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
            [{"a": 1}],
            [{"b": 1}],
        ),
        (
            {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
            [[1], []],
            [["a"], [1, 2]],
        ),
        (
            {"anyOf": [{"type": "object"}], "additionalProperties": False, "patternProperties": {"^a": {}}},
            [{"a": 1}],
            [{"b": 1}],
        ),
        # oneOf
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [3]}]}, [1, 3], [4]),
        ({"oneOf": [ONE, OTHER]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
        ({"anyOf": [{"type": "integer"}], "oneOf": [{"const": 1}, {"const": "a"}]}, [1], ["a", 2]),
        (
            {
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                "discriminator": {"propertyName": "t"},
                "$defs": {"Cat": CAT, "Dog": DOG},
            },
            [{"t": "dog"}, {"t": "cat", "of": {"t": "dog"}}],
            [{}, {"of": {"t": "dog"}}, {"t": "cow"}],
        ),
        # References
        ({"$ref": "#foo", "$defs": {"a": {"$anchor": "foo", "type": "integer"}}}, [1], ["a"]),
        (
            {"$id": "https://a.b/c", "$ref": "c#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}},
            [1],
            ["a"],
        ),
        (
            {
                "$ref": "T",
                "$defs": {
                    "a": {
                        "$id": "T",
                        "type": "array",
                        "items": {"$ref": "#/$defs/q"},
                        "$defs": {"q": {"type": "integer"}},
                    }
                },
            },
            [[1]],
            [["a"]],
        ),
        # Patterns
        (
            {"type": "string", "pattern": PYDANTIC_DECIMAL + r"\d*\.?\d*$"},
            ["1", "-1.5", ".5", "00"],
            ["", "+", ".", "a"],
        ),
        (
            {"type": "string", "pattern": PYDANTIC_DECIMAL + r"\d*\.?\d{0,2}0*$"},
            ["123.45", "1.200"],
            ["1.234", ""],
        ),
        (
            {
                "type": "string",
                "pattern": PYDANTIC_DECIMAL
                + r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
            },
            ["123.45", "1", "0.5"],
            ["1234", "1.234", "", "abc"],
        ),
        (
            {
                "type": "string",
                "pattern": PYDANTIC_DECIMAL + r"(?:\d{0,5}|(?=[\d.]{1,6}0*$)\d*\.\d*0*$)",
            },
            ["123.45", "12345"],
            ["123456", "123.456", ""],
        ),
        (
            {"type": "string", "pattern": ZOD_EMAIL, "format": "email"},
            ["a@b.co", "a.b@b.co"],
            [".a@b.co", "a..b@b.co"],
        ),
        ({"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d).{3,}$"}, ["A1b", "x1A"], ["A1", "a1b"]),
        ({"type": "string", "pattern": "^.$"}, ["a"], ["\r", "\u2028", "ab"]),
        ({"type": "string", "pattern": r"^[\]a[&&~~]\uD83D\uDE00\/\cJ$"}, ["&😀/\n", "[😀/\n"], ["b😀/\n"]),
    ],
)  # fmt: skip
def test_prepared_schemas_are_kept_to(
    grammars: TokenGrammars, schema: Any, good: list[Any], bad: list[Any]
) -> None:
    grammar = encoded(json_schema=schema)
    for value in good:
        assert accepts(grammars, grammar, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not accepts(grammars, grammar, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": -(2**63)}, "`const` at /const: .*64-bit.*value -9223372036854775808, limit"),
        ({"const": 10**400}, r"`const` at /const: .*\(401 characters\)"),
        ({"properties": {"a/b": {"enum": [1, {"x": [2**53 + 1]}]}}}, "`enum` at /properties/a~1b/enum/1/x/0: .*2\\^53"),
        ({"const": 1e300}, "`const` at /const"),
        ({"const": -9217416.858784555}, "`const` at /const: .*15 digits"),
        ({"minimum": 1234567890123456789, "maximum": 1234567890123456789}, "`minimum` at /minimum: .*2\\^53"),
        ({"type": "integer", "minimum": 2**63}, "`minimum` at /minimum: .*64-bit"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "no integer between"),
        ({"type": "number", "minimum": "5"}, "`minimum` at /minimum: .*number"),
        ({"type": "number", "minimum": 1e-300}, "`minimum` at /minimum: .*decimals"),
        ({"type": "number", "exclusiveMinimum": 5e-324, "maximum": 1}, "`exclusiveMinimum` at /.*decimals"),
        ({"type": "number", "maximum": -1e-310}, "`maximum` at /maximum: .*decimals"),
        ({"multipleOf": 0}, "`multipleOf` at /multipleOf: .*greater than 0"),
        ({"multipleOf": 4294967291}, "`multipleOf` at /multipleOf: .*value 4294967291, limit 50000"),
        ({"allOf": [{"multipleOf": 49999}, {"multipleOf": 49998}]}, "`multipleOf` 49998, 49999"),
        ({"type": "array", "uniqueItems": True}, "`uniqueItems` at /uniqueItems is not supported"),
        ({"not": {"type": "string"}}, "`not` at /not is not supported"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "`if` at /if .*anyOf"),
        ({"dependentRequired": {"a": ["b"]}}, "`dependentRequired` at"),
        ({"contains": {"type": "string"}}, "`contains` at"),
        ({"dependencies": {"a": ["b"]}}, "`dependencies` at"),
        ({"$ref": "#/$defs/a", "unevaluatedProperties": False, "$defs": {"a": {}}}, "`unevaluatedProperties`"),
        ({"$dynamicRef": "#a"}, r"`\$dynamicRef` at /\$dynamicRef"),
        ({"minProperties": 2}, "`minProperties` at /minProperties asks for 2"),
        ({"minLength": 2**53}, "`minLength` at /minLength is too large"),
        ({"minItems": -1}, "`minItems` at /minItems"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}}, "`propertyNames` at /propertyNames"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "`oneOf` at /oneOf: /oneOf/0 and /oneOf/1 .*anyOf"),
        ({"oneOf": [{"enum": [1, True]}, {"enum": [1.0]}]}, "`oneOf` at"),
        ({"pattern": r"\bfoo"}, "`pattern` at /pattern: .*word boundary"),
        ({"pattern": r"(a)\1"}, "`pattern` at /pattern: .*backreference"),
        ({"pattern": "a(?!b)"}, "`pattern` at /pattern: .*lookaround"),
        ({"pattern": "(" * 100 + ")" * 100}, "`pattern` at /pattern: .*value 65, limit 64"),
        ({"type": "string", "pattern": "(a"}, "regex parse error: .*unclosed group"),
        ({"$ref": "https://a.b/c"}, r"`\$ref` at /\$ref points outside .*\$defs"),
        ({"$ref": "#/nowhere"}, r"`\$ref` at /\$ref does not point to a schema"),
        ({"$ref": "#"}, "it allows no text"),
        ({"properties": {"a": "string"}}, "/properties/a is not a schema"),
        ({"type": "any"}, "`type` at /type"),
        ({"anyOf": []}, "`anyOf` at /anyOf"),
        ({"required": True}, "`required` at /required"),
        ({"patternProperties": {f"^{each}$": {} for each in range(101)}}, "value 101, limit 100"),
        ({"not": {}}, "schema is false"),
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_kept_to_are_refused_by_name(
    grammars: TokenGrammars, schema: Any, message: str
) -> None:
    with pytest.raises(RequestRefused, match=message) as refusal:
        grammars.check(encoded(json_schema=schema))
    assert re.fullmatch(
        r"the schema or grammar cannot be used: .*Remedy: .*[^.]\.", str(refusal.value)
    )


def chain(kind: str, length: int) -> dict[str, Any]:
    """Return schemas that refer to each other, one after the other."""
    made: dict[str, Any] = {f"c{length}": {"type": "integer"}}
    for at in range(length):
        following = {"$ref": f"#/$defs/c{at + 1}"}
        held = following if kind in {"items", "additionalProperties"} else [following]
        made[f"c{at}"] = {kind: held}
    return {"$ref": "#/$defs/c0", "$defs": made}


@pytest.mark.parametrize(
    "kind", ["items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties"]
)
def test_long_chains_of_references_are_refused(grammars: TokenGrammars, kind: str) -> None:
    grammars.check(encoded(json_schema=chain(kind, CHAIN_MAX // 4)))
    with pytest.raises(RequestRefused, match=rf"\$ref.*value 3\d*, limit {CHAIN_MAX}"):
        grammars.check(encoded(json_schema=chain(kind, 1000)))


@pytest.mark.parametrize(
    "text",
    [
        "start: r0\n" + "\n".join(f'r{at}: "a" r{at + 1}?' for at in range(3000)) + '\nr3000: "b"',
        "start: R0\n" + "\n".join(f'R{at}: R{at + 1} "a"' for at in range(3000)) + '\nR3000: "b"',
        pytest.param(
            "root ::= r0\n"
            + "\n".join(f'r{at} ::= "a" r{at + 1}' for at in range(650))
            + '\nr650 ::= "b"',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_long_chains_of_rules_are_refused(grammars: TokenGrammars, text: str) -> None:
    with pytest.raises(RequestRefused, match=f"rules are nested too deep .*limit {RULES_MAX}"):
        grammars.check(encoded(grammar=text))


@pytest.mark.parametrize(
    ("references", "length"),
    [
        ({"a": {}}, 2),
        ({"a": {"b": 2}, "b": {"c": 1}, "c": {}}, 5),
        ({"a": {"b": 1}, "b": {"a": 1}, "c": {"a": 1}}, 5),
        ({"a": {"a": 1, "b": 1}, "b": {}}, 3),
    ],
)
def test_longest_chain_counts_circles_as_a_whole(
    references: dict[str, dict[str, int]], length: int
) -> None:
    assert longest_chain(dict.fromkeys(references, 2), references)[0] == length


@pytest.mark.parametrize(
    "text",
    [
        'start: "x" %json {"const": 9007199254740993}',
        'start: /["]/ inner // "\ninner: %json\n {"properties": {"a": {"const": -9223372036854775808}}}',
        'start: <[65]> "\\"" %json {"enum": [18446744073709551616]}',
        'start: %lark { start: %json {"const": 9007199254740993} }',
    ],
)  # fmt: skip
def test_schemas_in_lark_are_refused_by_name(grammars: TokenGrammars, text: str) -> None:
    with pytest.raises(RequestRefused, match="`(const|enum)` at /.*Remedy"):
        grammars.check(encoded(grammar=text))


def test_schemas_in_lark_are_prepared_and_other_text_is_left(grammars: TokenGrammars) -> None:
    text = (
        'start: "%json {" inner // %json {"const": 9007199254740993}\n'
        'inner: %json {"type": "string", "format": "password", "maxLength": 2,\n'
        ' "x-guidance": {"whitespace_flexible": false}} /\\/%json/'
    )
    grammar = encoded(grammar=text)
    grammars.check(grammar)
    assert accepts(grammars, grammar, '%json {"ab"/%json')
    assert not accepts(grammars, grammar, '%json {"abc"/%json')


@pytest.mark.parametrize("wrapped", [False, True])
def test_schemas_of_calls_are_prepared_or_refused(grammars: TokenGrammars, wrapped: bool) -> None:
    def calls(schema: Any) -> str:
        tree = {"start": {"all": ["<", {"schema": schema}, ">"]}, "rules": {}}
        kind: dict[str, Any] = {"calls": tree}
        return encoded(thought={"end": "</t>", "answer": kind}) if wrapped else encoded(**kind)

    good = calls({"type": "string", "format": "password", "pattern": PYDANTIC_DECIMAL + r"\d*$"})
    grammars.check(good)
    assert accepts(grammars, good, ("</t>" if wrapped else "") + '<"12">')
    with pytest.raises(RequestRefused, match="`const` at /properties/id/const"):
        grammars.check(calls({"properties": {"id": {"const": 2**63}}}))


def test_prepared_keeps_the_order_of_keys_and_leaves_what_was_sent() -> None:
    sent = {"type": "object", "properties": {"b": {"title": "B"}, "a": {"$ref": "#/$defs/z"}}}
    sent["$defs"] = {"unused": {"not": 1}, "z": {"type": "null"}}
    before = json.dumps(sent)
    made = rewrite_schema(sent)
    assert json.dumps(sent) == before
    assert json.dumps(made) == json.dumps(
        {
            "type": "object",
            "properties": {"b": {}, "a": {"$ref": "#/$defs/z"}},
            "$defs": {"z": {"type": "null"}},
        }
    )


def _number(rng: random.Random) -> int | float:
    match rng.randrange(6):
        case 0:
            return rng.randrange(-20, 20)
        case 1:
            return rng.choice([1, -1]) * ((1 << rng.randrange(50, 66)) + rng.randrange(-3, 4))
        case 2:
            return rng.choice([0, 0.0, -0.0, 0.5, -0.5, 0.25, 3, 3.5, 1e-9, 100])
        case 3:
            return rng.choice([1, -1]) * int(10.0 ** rng.randrange(20)) + rng.randrange(-1, 2)
        case 4:
            return round(rng.uniform(-10, 10), rng.randrange(1, 6))
    return rng.uniform(-1, 1) * 10.0 ** rng.randrange(-8, 25)


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["number", "integer", "enum", "string", "boolean"]
    match rng.choice(
        kinds + (["object", "array", "anyOf", "allOf", "oneOf", "$ref"] if depth else [])
    ):
        case "enum":
            return {"enum": [*rng.sample(["a", "b", True, None, [1, {"x": 2}]], 2), _number(rng)]}
        case "string":
            return {"type": "string", "maxLength": 2, "format": rng.choice(["date", "x"])}
        case "boolean":
            return {"type": ["boolean", "null"], "x-unknown": 1}
        case "object":
            names = rng.sample(["a", "b c", "ü", "type"], 2)
            return {
                "properties": {name: _schema(rng, depth - 1) for name in names},
                "required": rng.choice([names, names[:1], [*names, "more"]]),
                "additionalProperties": rng.choice([False, {"type": "boolean"}]),
                "type": "object",
            }
        case "array":
            return {
                "type": "array",
                "prefixItems": [_schema(rng, depth - 1)],
                "items": rng.choice([False, _schema(rng, 0)]),
                "maxItems": 2,
                "minItems": rng.randrange(2),
            }
        case "anyOf" | "oneOf" as keyword:
            return {keyword: [_schema(rng, depth - 1) for _ in range(2)]}
        case "allOf":
            bounded = {rng.choice(["minimum", "exclusiveMaximum"]): _number(rng)}
            return {"allOf": [_schema(rng, depth - 1), bounded]}
        case "$ref":
            return {"$ref": "#/$defs/shared"}
        case kind:
            chosen = rng.sample(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], 2)
            schema: dict[str, Any] = {"type": kind, **{name: _number(rng) for name in chosen}}
            if rng.random() < 0.2:
                schema["multipleOf"] = rng.choice([1, 2, 0.5, 0.01, 10, 1.5, 0.07])
            return schema
    raise AssertionError


def _exact(value: Any) -> Fraction:
    return Fraction(Decimal(repr(value)) if isinstance(value, float) else Decimal(value))


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_equal, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_equal(value[key], other[key]) for key in value)
    if _type(value) != _type(other):
        return False
    return _exact(value) == _exact(other) if _type(value) == "number" else bool(value == other)


def _type(value: Any) -> str:
    names = {bool: "boolean", str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "number")


def _bounded(value: Any, schema: dict[str, Any]) -> bool:
    if _type(value) != "number":
        return True
    exact = _exact(value)
    checks: dict[str, Callable[[Fraction], bool]] = {
        "minimum": lambda each: exact >= each,
        "maximum": lambda each: exact <= each,
        "exclusiveMinimum": lambda each: exact > each,
        "exclusiveMaximum": lambda each: exact < each,
        "multipleOf": lambda each: (exact / each).denominator == 1,
    }
    return all(check(_exact(schema[key])) for key, check in checks.items() if key in schema)


def fits(value: Any, schema: Any, root: dict[str, Any]) -> bool:
    """Return whether a value matches one of these schemas: an independent check with exact numbers."""
    if isinstance(schema, bool):
        return schema
    kinds = schema.get("type", _type(value))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    whole = ["integer"] if _type(value) == "number" and _exact(value).denominator == 1 else []
    if not set(kinds) & {_type(value), *whole} or not _bounded(value, schema):
        return False
    if "$ref" in schema and not fits(value, root["$defs"]["shared"], root):
        return False
    if "enum" in schema and not any(_equal(value, each) for each in schema["enum"]):
        return False
    counts = {
        key: sum(fits(value, each, root) for each in schema.get(key, ()))
        for key in ("allOf", "anyOf", "oneOf")
    }
    if counts["allOf"] < len(schema.get("allOf", ())) or (
        "anyOf" in schema and not counts["anyOf"]
    ):
        return False
    if "oneOf" in schema and counts["oneOf"] != 1:
        return False
    return _fits_inside(value, schema, root)


def _fits_inside(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    if isinstance(value, str):
        return bool(len(value) <= schema.get("maxLength", len(value)))
    if isinstance(value, list) and "prefixItems" in schema:
        rest = [schema["items"]] * len(value)
        pairs = zip(value, [*schema["prefixItems"], *rest], strict=False)
        return schema["minItems"] <= len(value) <= 2 and all(fits(a, b, root) for a, b in pairs)
    if isinstance(value, dict) and "properties" in schema:
        listed, rest = schema["properties"], schema["additionalProperties"]
        return set(schema["required"]) <= value.keys() and all(
            fits(each, listed.get(name, rest), root) for name, each in value.items()
        )
    return True


def _seen(grammars: TokenGrammars, seeds: range) -> dict[str, int]:
    counts = {"refused": 0, "endless": 0, "fits": 0}
    for seed in seeds:
        rng = random.Random(seed)
        schema = _schema(rng, 3)
        schema = {**schema, "$defs": {"shared": _schema(rng, 0)}}
        try:
            grammars.check(encoded(json_schema=schema))
        except RequestRefused:
            counts["refused"] += 1
            continue
        for _ in range(3):
            text = draw(grammars, schema, rng)
            if text is None or re.search(r"\d[eE][+-]?\d", text):
                counts["endless"] += 1
                continue
            value = json.loads(text, parse_float=Decimal)
            assert fits(value, schema, schema), (seed, schema, text)
            counts["fits"] += 1
    return counts


def test_random_schemas_are_kept_to_exactly_or_refused(grammars: TokenGrammars) -> None:
    counts = _seen(grammars, range(20))
    assert counts["fits"] > 20, counts


@pytest.mark.slow
def test_many_random_schemas_are_kept_to_exactly_or_refused(grammars: TokenGrammars) -> None:
    counts = _seen(grammars, range(20, 500))
    assert counts["fits"] > 450, counts


@pytest.mark.parametrize(
    "options",
    [
        [{"const": at} for at in range(2000)],
        [
            {"type": "object", "properties": {"t": {"const": at}}, "required": ["t"]}
            for at in range(500)
        ],
    ],
)
def test_many_options_of_one_of_are_distinguished(options: list[dict[str, Any]]) -> None:
    assert rewrite_schema({"oneOf": options}) == {"anyOf": options}
