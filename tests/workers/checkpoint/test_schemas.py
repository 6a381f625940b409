"""JSON schemas: each keyword is enforced exactly by the grammar library, or refused by name."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any

import pytest

from tests.each_case import each_case
from tests.fuzz.schemas import fits, random_schema
from tests.workers.checkpoint.draws import allowed, encoded
from vsched.errors import RequestRefused
from vsched.types import FinishReason
from vsched_workers.checkpoint.grammars import TokenGrammars
from vsched_workers.checkpoint.schemas import rewrite_schema
from vsched_workers.checkpoint.tokenize import TokenTable

END = 256
TOKENS_MAX = 200


@pytest.fixture(scope="module")
def grammars() -> TokenGrammars:
    """Grammars over bytes."""
    raw = [bytes([each]) for each in range(END)]
    return TokenGrammars(TokenTable([*raw, b"<end>"], [*raw, b""]), vocab_size=END + 1, ends=[END])


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
ONE, OTHER = ({"type": "object", "required": [name], "properties": {name: {}}} for name in "ab")
PYDANTIC_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # Numbers
        ({"const": {"a": [1e15, -0.5]}}, [{"a": [10**15, -0.5]}], [{"a": [10**15 + 1, -0.5]}]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
         [0, 2**53, -(2**53)], [2**63, -(2**63) - 1]),
        ({"type": "integer", "format": "uint64", "minimum": 0.0}, [0, 2**64 - 1], [-1]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": 0.5, "exclusiveMaximum": 4}, [1, 3], [0, 4]),
        ({"type": "number", "maximum": 2**63}, [5, -1.5], [2**63, 2**63 + 1, 9223372036854775001]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.25, 0.5], [0, 0.51]),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, [0.25, 0.5], [0, 0.51]),
        ({"type": "number", "multipleOf": 0.01}, [0.29, 1.1, 19.99], [0.001]),
        ({"type": "integer", "multipleOf": 0.5}, [3], []),
        ({"allOf": [{"multipleOf": 6}, {"multipleOf": 4}]}, [12], [6, 4]),
        # Annotations, and keywords without effect
        *(
            ({"type": "string", "format": name}, ["any text"], [1])
            for name in ("uri-reference", "byte", "unknown", "regex")
        ),
        ({"type": "string", "format": "time", "pattern": r"^\d\d:\d\d$"}, ["23:59"], ["23:59:59Z"]),
        ({"type": "string", "default": 2**70, "examples": [2**70], "x-a": 1}, ["a"], [1]),
        ({"x-guidance": {"lenient": True}, "type": "integer"}, [1], ["1"]),
        ({"uniqueItems": False, "items": {"type": "integer"}, "type": "array"}, [[1, 1]], [["a"]]),
        ({"type": "string", "maxLength": 2**31 - 1}, ["abc"], [1]),
        # Keywords that can be expressed by others
        ({"type": "object", "properties": {"not": {"not": {}}, "b": {}}}, [{"b": 1}], [{"not": 1}]),
        ({**INTEGERS, "propertyNames": {"type": "string"}}, [{"x": 1}], [{"x": "1"}]),
        ({**INTEGERS, "propertyNames": {"enum": ["a", "b"]}}, [{}, {"b": 1}], [{"c": 1}, {"a": "x"}]),
        ({**INTEGERS, "propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"const": "a"}}},
         [{"a": 1}], [{"b": 1}]),
        ({**INTEGERS, "propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}]),
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
         [[1], []], [["a"], [1, 2]]),
        ({"type": "object", "additionalProperties": False, "patternProperties": {"^a": {}}},
         [{"a": 1}], [{"b": 1}]),
        # Objects get no additional properties, unless several schemas apply to them
        ({"properties": {"a": ONE}, "type": "object"}, [{"a": {"a": 1}}], [{"b": 1}, {"a": {"a": 1, "b": 1}}]),
        ({"allOf": [ONE, OTHER]}, [{"a": 1, "b": 1}], [{"a": 1}]),
        ({**ONE, "additionalProperties": True}, [{"a": 1, "b": 1}], []),
        ({**ONE, "required": ["b"]}, [{"b": 1}], [{"a": 1}]),
        # oneOf
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [3]}, {"type": "null"}]}, [1, 3, None], [4]),
        ({"oneOf": [ONE, OTHER]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
        ({"anyOf": [{"type": "integer"}], "oneOf": [{"const": 1}, {"const": "a"}]}, [1], ["a", 2]),
        ({"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
          "discriminator": {"propertyName": "t"}, "$defs": {"Cat": CAT, "Dog": DOG}},
         [{"t": "dog"}, {"t": "cat", "of": {"t": "dog"}}],
         [{}, {"of": {"t": "dog"}}, {"t": "cow"}]),
        # References
        ({"$id": "https://a.b/c", "$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}}, [1], ["a"]),
        # Patterns
        ({"type": "string", "pattern": PYDANTIC_DECIMAL + r"\d*\.?\d*$"},
         ["1", "-1.5", ".5", "00"], ["", "+", ".", "a"]),
        ({"type": "string",
          "pattern": PYDANTIC_DECIMAL + r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"},
         ["123.45", "1", "0.5"], ["1234", "1.234", "", "abc"]),
        ({"type": "string", "pattern": ZOD_EMAIL, "format": "email"},
         ["a@b.co", "a.b@b.co"], [".a@b.co", "a..b@b.co"]),
        ({"type": "string", "pattern": "^.$"}, ["a"], ["\r", "\u2028", "ab"]),
        ({"type": "string", "pattern": r"^[\s\S][^\s@]\s$"}, ["aa "], ["aa\x85", "a\ufeff ", "a@ "]),
        ({"type": "string", "pattern": r"^[\]a[&&~~]\/$"}, ["&/", "[/"], ["b/"]),
    ],
)  # fmt: skip
def test_schemas_are_enforced(
    grammars: TokenGrammars, schema: Any, good: list[Any], bad: list[Any]
) -> None:
    grammar = encoded(json_schema=schema)
    for value in good:
        assert accepts(grammars, grammar, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not accepts(grammars, grammar, json.dumps(value, ensure_ascii=False)), value


NESTED: dict[str, Any] = {"type": "integer"}
for _ in range(100):
    NESTED = {"items": NESTED}


@each_case(
    ("schema", "message"),
    [
        ({"const": -(2**63)}, "/const is not exact.*value -9223372036854775808, limit"),
        ({"const": 10**400}, "/const is not exact.*many digits"),
        ({"properties": {"a/b": {"enum": [1, {"x": [2**53 + 1]}]}}}, "/properties/a~1b/enum/1/x/0 is .*2\\^53"),
        ({"const": -9217416.858784555}, "/const is not exact.*15 digits"),
        ({"type": "integer", "minimum": 2**63}, "/minimum is not exact"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum .5. is greater"),
        ({"type": "number", "minimum": "5"}, "/minimum is not a number"),
        ({"type": "number", "exclusiveMinimum": 5e-324, "maximum": 1}, "/exclusiveMinimum is not exact"),
        ({"multipleOf": 0}, "/multipleOf is not positive: value 0, limit"),
        ({"multipleOf": 4294967291}, "/multipleOf is too large: value 4294967291, limit 50000"),
        ({"properties": {"x": {"multipleOf": 0.07}}},
         "/properties/x/multipleOf has too many digits as a 64-bit float: value 0.07, limit .*0.01. Remedy: use such"),
        *(
            ({"items": {keyword: {"type": "string"}}}, f"/items/{re.escape(keyword)} is not supported.*Remedy: ")
            for keyword in (
                "uniqueItems", "not", "if", "then", "else", "contains", "dependentRequired", "dependentSchemas",
                "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
            )
        ),
        ({"minProperties": 2}, "/minProperties asks for too many.*value 2, limit 1"),
        ({"minItems": -1}, "/minItems is not a count: value -1, limit an integer from 0"),
        ({"items": {"maxLength": 1.5}}, "/items/maxLength is not a count: value 1.5"),
        ({"minProperties": True}, "/minProperties is not a count: value true"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}}, "/propertyNames is supported with"),
        ({"propertyNames": 3}, "/propertyNames is supported with"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf is supported if .* 0 and 1 .*anyOf"),
        ({"oneOf": [{"enum": [1, True]}, {"enum": [1.0]}]}, "/oneOf is supported if"),
        ({"oneOf": [{"const": each} for each in range(300)]}, "/oneOf has too many options: value 300, limit 256"),
        ({"pattern": r"\bfoo"}, r"/pattern has \\b, which is not supported. Remedy: use a pattern without look"),
        ({"pattern": "a(?!b)"}, r"/pattern has \(\?!, which"),
        ({"items": {"pattern": r"(?<=a)b"}}, r"/items/pattern has \(\?<=, which"),
        ({"pattern": r"(a)\1"}, r"/pattern has \\1, which"),
        ({"patternProperties": {r"^(?!\.)a|b": {}}}, r"/patternProperties has \(\?!, which"),
        ({"pattern": "[]a]"}, "/pattern has an empty character class"),
        ({"type": "string", "pattern": "(a"}, "regex parse error: .*unclosed group"),
        ({"$ref": "https://a.b/c"}, r"/\$ref is not a schema of this document.*\$defs"),
        ({"$ref": "#/nowhere"}, r"/\$ref is not a schema"),
        ({"$ref": 3}, r"/\$ref is not a schema"),
        ({"items": {"$id": "a"}}, r"/items/\$id is supported only"),
        ({"$ref": "#"}, "it allows no text"),
        ({"properties": {"a": "string"}}, "/properties/a is not a schema"),
        ({"properties": []}, "/properties is not an object"),
        ({"type": "any"}, '/type is not a type: value "any", limit null, boolean, integer, number, string, array, obj'),
        ({"items": {"type": ["null", 5]}}, r'/items/type is not a type: value \["null", 5\]'),
        ({"enum": 3}, "/enum is not a list"),
        ({"anyOf": []}, "anyOf is empty"),
        ({"anyOf": 3}, "/anyOf is not a list"),
        ({"required": True}, "/required is not a list"),
        ({"format": {}, "pattern": {}}, "/pattern is not a string"),
        ({"not": {}}, "schema is false"),
        (NESTED, "nested too deep: value 101 or more, limit 100"),
    ],
)  # fmt: skip
def test_unsupported_schemas_are_refused(
    grammars: TokenGrammars, schema: Any, message: str
) -> None:
    with pytest.raises(RequestRefused, match=message) as refusal:
        grammars.check(encoded(json_schema=schema))
    assert re.fullmatch(
        r"the schema or grammar cannot be used: .*Remedy: .*[^.]\.", str(refusal.value)
    )


def test_schemas_in_a_grammar_are_refused(grammars: TokenGrammars) -> None:
    with pytest.raises(RequestRefused, match="%json is not supported.*Remedy"):
        grammars.check(encoded(grammar='start: "x" %json {"const": 9007199254740993}'))


@pytest.mark.parametrize("wrapped", [False, True])
def test_schemas_of_calls_are_rewritten_or_refused(grammars: TokenGrammars, wrapped: bool) -> None:
    def calls(schema: Any) -> str:
        tree = {"start": {"all": ["<", {"schema": schema}, ">"]}, "rules": {}}
        kind: dict[str, Any] = {"calls": tree}
        return encoded(thought={"end": "</t>", "answer": kind}) if wrapped else encoded(**kind)

    good = calls({"type": "string", "format": "password", "pattern": PYDANTIC_DECIMAL + r"\d*$"})
    grammars.check(good)
    assert accepts(grammars, good, ("</t>" if wrapped else "") + '<"12">')
    with pytest.raises(RequestRefused, match="/properties/id/const"):
        grammars.check(calls({"properties": {"id": {"const": 2**63}}}))


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        (r"^\d+$", "12", True),
        (r"^\d+$", "1\u0661", False),
        (r"^\w+$", "a_1", True),
        (r"^\w+$", "é", False),
        (r"^[\d-]+$", "1-2", True),
        (r"^[\d-]+$", "\u0661", False),
        (r"^\D$", "\u0661", True),
        (r"^[^\w]$", "é", True),
    ],
)
def test_classes_of_patterns_are_ascii(
    grammars: TokenGrammars, pattern: str, text: str, fits: bool
) -> None:
    """In strings of JSON, and in arguments of calls that are written without quotes."""
    written = {"text": {"end": "<", "without": "<", "pattern": pattern}}
    schema = {"type": "string", "pattern": pattern}
    for grammar, output in (
        (encoded(json_schema=schema), f'"{text}"'),
        (encoded(calls={"start": written, "rules": {}}), f"{text}<"),
    ):
        assert accepts(grammars, grammar, output) == fits, grammar


def test_rewriting_keeps_the_order_of_keys_and_the_sent_schema() -> None:
    sent = {"type": "object", "properties": {"b": {"title": "B"}, "a": {"$ref": "#/$defs/z"}}}
    sent["$defs"] = {"z": {"type": "null"}}
    before = json.dumps(sent)
    made = rewrite_schema(sent)
    assert json.dumps(sent) == before
    wanted = before.replace('{"title": "B"}', "{}")[:-1] + ', "additionalProperties": false}'
    assert json.dumps(made) == wanted


@pytest.mark.slow
def test_outputs_match_many_random_schemas(grammars: TokenGrammars) -> None:
    counts = {"refused": 0, "endless": 0, "fits": 0}
    for seed in range(100):
        rng = random.Random(seed)
        schema = random_schema(rng, 3, edges=True)
        schema = {**schema, "$defs": {"shared": random_schema(rng, 0, edges=True)}}
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
            assert fits(json.loads(text, parse_float=Decimal), schema), (seed, schema, text)
            counts["fits"] += 1
    assert counts["fits"] > 95, counts
    assert counts["refused"] < 75, counts
