"""Hostile JSON schemas: every keyword of draft-07 and 2020-12, with values at the limits of parsers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.patterns import count, draw_pattern

TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
EDGES: tuple[Any, ...] = tuple(
    sign * 2**bits + more for bits in (31, 32, 53, 63, 64, 70, 127) for sign in (1, -1) for more in (-1, 0, 1)
)  # fmt: skip
EDGES += (
    0,
    -0.0,
    0.1,
    1e-9,
    5e-324,
    1e15,
    1e16,
    1e19,
    -1e19,
    1e300,
    -1e300,
    1e308,
    -1.7e308,
    10**40,
    -(10**40),
    10**400,
)
FORMATS = (
    "date", "date-time", "time", "duration", "email", "idn-email", "hostname", "ipv4", "ipv6",
    "uri", "uri-reference", "iri", "uuid", "uri-template", "json-pointer", "relative-json-pointer",
    "regex", "int32", "int64", "byte", "password", "", "no",
)  # fmt: skip
TEXTS = (
    "", "a", "b c", 'q"\\', "\n", "\x00", "é", "日本", "\U0001f642", "</tool_call>", "<|im_end|>",
    "$ref", "type", "x" * 300, "properties", "__proto__", "/", "~0~1", "a/b", "%25", "#", "e\u0301",
)  # fmt: skip
REFERENCES = (
    "#", "#/", "#/$defs/a", "#/$defs/b", "#/$defs/nowhere", "#a", "#/properties/a", "#/items",
    "#/$defs/a/$defs/b", "", "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2020-12/schema", "file:///etc/passwd", "http://127.0.0.1:9/x",
    "other.json#/a", "urn:uuid:0", "//a", "#/$defs/~0~1", "#/%24defs/a", "#/allOf/0", "\x00",
    "#/$defs",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 10**12, "", "x", "(", [], {}, [[]], [None], {"": {}},
    ["string", 3], {"$ref": 3}, {"$ref": "#"}, {"type": {}}, [{}] * 50, "\ud800", 2**63, 1e308,
)  # fmt: skip
NESTED = (1, 3, 10, 40, 64, 65, 130, 300, 400)
LINKS = (2, 10, 60, 200, 500, 1000, 1500)
SIZES = (3, 30, 300, 2500)
DUPLICATE = "duplicate:"
"""Prefix of a key that becomes, in the text that is sent, a duplicate of the key after it."""

_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = (
    "items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
_NAMED = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
)
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    "minContains", "maxContains",
)  # fmt: skip
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_PLAIN = (
    "type", "enum", "const", "pattern", "format", "required", "dependentRequired", "uniqueItems",
    "$ref", "$dynamicRef", "$recursiveRef", "$id", "$anchor", "$dynamicAnchor", "$schema",
    "$comment", "title", "description", "default", "examples", "readOnly", "deprecated",
    "contentEncoding", "contentMediaType", "nullable", "x-guidance", "discriminator", "$vocabulary",
)  # fmt: skip
_FLAGS = ("uniqueItems", "readOnly", "deprecated", "nullable")
_OPTIONS = ("whitespace_flexible", "coerce_one_of", "lenient")
KEYWORDS = (*_LIST, *_ONE, *_NAMED, *_COUNTS, *_NUMBERS, *_PLAIN)
_SERVED = (
    "allOf", "anyOf", "prefixItems", "items", "additionalProperties", "properties",
    "patternProperties", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum",
    "exclusiveMinimum", "multipleOf", "type", "enum", "const", "pattern", "format", "required",
    "$ref",
)  # fmt: skip
"""Keywords that are mostly served: a schema with any other may fail the check of its keywords."""


def draw_schema(rng: random.Random) -> Any:
    """Draw a schema: few keywords or many, or one excessive construct."""
    shape = rng.choice(_SHAPES) if rng.random() < 0.4 else _keywords
    return shape(rng)


def _keywords(rng: random.Random, depth: int = 3) -> Any:
    """Return a schema of random keywords, mostly with valid values, which agree with each other in about half."""
    if rng.random() < 0.05:
        return rng.choice((True, False, *ODD))
    made: dict[str, Any] = {}
    if rng.random() < 0.5:
        made.update(_typed(rng, depth))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 6) if made else (1, 1, 2, 3, 8))):
        keyword = rng.choice(_SERVED if rng.random() < 0.8 else KEYWORDS)
        value = rng.choice(ODD) if rng.random() < 0.06 else _value(keyword, rng, depth)
        made[DUPLICATE + keyword if rng.random() < 0.02 else keyword] = value
    if depth == 3 and rng.random() < 0.5:
        made.setdefault("$defs", {"a": _keywords(rng, 1), "b": {"$ref": rng.choice(REFERENCES)}})
    return made


def _typed(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return a schema of one type and keywords that belong to it."""
    match kind := rng.choice(TYPES):
        case "string":
            keyword = rng.choice(("minLength", "maxLength", "pattern", "format", "enum"))
        case "integer" | "number":
            low, high = sorted((number(rng), number(rng)))
            ends = rng.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")))
            return {"type": kind, ends[0]: low, ends[1]: rng.choice((low, low + 1, high))}
        case "object" if depth:
            held = _value("properties", rng, depth)
            names = [name for name in held if rng.random() < 0.7]
            return {
                "type": kind,
                "properties": held,
                "required": names,
                "additionalProperties": rng.random() < 0.3,
            }
        case "array" if depth:
            return {
                "type": kind,
                "items": _keywords(rng, depth - 1),
                rng.choice(("minItems", "maxItems")): count(rng),
            }
        case _:
            return {"type": kind}
    return {"type": kind, keyword: _value(keyword, rng, depth)}


def number(rng: random.Random) -> Any:
    """Draw a number, mostly at the edge of a type."""
    if rng.random() < 0.7:
        return rng.choice(EDGES)
    return rng.choice((rng.randrange(-100, 100), rng.uniform(-9, 9)))


def _value(keyword: str, rng: random.Random, depth: int) -> Any:
    """Return a value that a keyword takes."""
    inner: Callable[[], Any] = (
        (lambda: _keywords(rng, depth - 1)) if depth else (lambda: rng.choice((True, {})))
    )
    if keyword in _LIST:
        return [inner() for _ in range(rng.randrange(1, 4))]
    if keyword in _ONE:
        return inner()
    if keyword in _NAMED:
        name = draw_pattern if keyword == "patternProperties" else _text
        return {name(rng): inner() for _ in range(rng.randrange(1, 4))}
    if keyword in _COUNTS:
        return count(rng)
    if keyword in _NUMBERS:
        return number(rng)
    return _VALUES.get(keyword, _text)(rng)


def _options(rng: random.Random) -> dict[str, Any]:
    """Return llguidance's own options of a schema."""
    made: dict[str, Any] = {name: rng.random() < 0.5 for name in _OPTIONS}
    if rng.random() < 0.3:
        made |= {"whitespace_pattern": draw_pattern(rng), "item_separator": draw_pattern(rng)}
    return made


def _reference(rng: random.Random) -> str:
    return rng.choice(REFERENCES if rng.random() < 0.3 else REFERENCES[:4])


def _text(rng: random.Random) -> str:
    return rng.choice(TEXTS) if rng.random() < 0.4 else rng.choice("abcd")


def _literal(rng: random.Random, depth: int) -> Any:
    """Return a JSON value."""
    match rng.randrange(8):
        case 0 | 1 | 2:
            return number(rng)
        case 3 if depth:
            return [_literal(rng, depth - 1) for _ in range(rng.randrange(4))]
        case 4 if depth:
            return {_text(rng): _literal(rng, depth - 1) for _ in range(rng.randrange(4))}
        case 5:
            return rng.choice((None, True, False))
    return _text(rng)


def _wrapped(rng: random.Random, inner: Any, keyword: str = "") -> dict[str, Any]:
    """Return a schema that contains another one."""
    keyword = keyword or rng.choice((*_LIST, *_ONE, *_NAMED))
    if keyword in _LIST:
        return {keyword: [inner, *rng.choice(((), ({"type": "null"},), (True,)))]}
    return {keyword: {rng.choice("ab"): inner} if keyword in _NAMED else inner}


def _deep(rng: random.Random) -> Any:
    """Return schemas within schemas, by one keyword or by all in turn."""
    keyword = rng.choice((*_LIST, *_ONE, *_NAMED, "", ""))
    made = _keywords(rng, 1)
    for _ in range(rng.choice(NESTED)):
        made = _wrapped(rng, made, keyword)
    return made


def _chain(rng: random.Random) -> Any:
    """Return references to references, each within a keyword; the last may lead back to the first, or nowhere."""
    links, keyword = rng.choice(LINKS), rng.choice((*_LIST, *_ONE, *_NAMED, "", "$ref", "$ref"))

    def link(to: int) -> dict[str, Any]:
        reference = {"$ref": f"#/$defs/d{to}"}
        if rng.random() < 0.002:
            reference["$ref"] = rng.choice(REFERENCES)
        return reference if keyword == "$ref" else _wrapped(rng, reference, keyword)

    made = {f"d{at}": link(at + 1) for at in range(links)}
    made[f"d{links}"] = rng.choice(({"type": "null"}, {"$ref": "#/$defs/d0"}, _keywords(rng, 1)))
    return {"$ref": "#/$defs/d0", "$defs": made}


def _web(rng: random.Random) -> Any:
    """Return definitions that each refer to several, perhaps to themselves."""
    names = [f"d{at}" for at in range(rng.choice((2, 3, 8, 30, 120)))]

    def reference(_: int = 0) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}

    def node() -> dict[str, Any]:
        keyword = rng.choice((*_LIST, "properties", "items", "additionalProperties"))
        if keyword in _LIST:
            return {keyword: [reference() for _ in range(rng.randrange(1, 5))]}
        if keyword == "properties":
            held = {name: reference() for name in "abc"[: rng.randrange(1, 4)]}
            return {
                "type": "object",
                "properties": held,
                "required": list(held)[: rng.randrange(3)],
            }
        return {"type": "array" if keyword == "items" else "object", keyword: reference()}

    made = {name: node() if rng.random() < 0.9 else _keywords(rng, 1) for name in names}
    return {**reference(), "$defs": made, **(node() if rng.random() < 0.2 else {})}


def _wide(rng: random.Random) -> Any:
    """Return very many of one thing: values, properties, alternatives, names."""
    size = rng.choice(SIZES)
    match rng.randrange(7):
        case 0:
            return {"enum": [f"{at:04}" * rng.choice((1, 3)) for at in range(size)]}
        case 1:
            return {
                "enum": [
                    rng.choice((at, -at, at / 7, at * 10**15, -(2**63) + at)) for at in range(size)
                ]
            }
        case 2:
            held = {
                f"p{at}": rng.choice(({"type": "string"}, {}, _keywords(rng, 0)))
                for at in range(size)
            }
            return {
                "type": "object",
                "properties": held,
                "required": [name for name in held if rng.random() < 0.5],
            }
        case 3:
            return {
                rng.choice(("anyOf", "oneOf")): [
                    _keywords(rng, rng.randrange(2)) for _ in range(min(size, 400))
                ]
            }
        case 4:
            return {
                "type": "object",
                "required": [f"p{at}" for at in range(size)],
                "maxProperties": count(rng),
            }
        case 5:
            return {
                "patternProperties": {
                    f"^{draw_pattern(rng)}{at}": {} for at in range(min(size, 100))
                }
            }
    return {
        "type": "array",
        "prefixItems": [_keywords(rng, 0) for _ in range(min(size, 600))],
        "items": False,
    }


def _products(rng: random.Random) -> Any:
    """Return alternatives that have to be compared pair by pair."""
    first, second = rng.choice((3, 12, 40)), rng.choice((3, 12, 40))

    def part(at: int, other: int) -> Any:
        return rng.choice(
            (
                {"pattern": f"a{at}*b{other}"},
                {"required": [f"p{at}", f"q{other}"]},
                {"properties": {f"p{at}": {"const": other}}},
                {"minimum": at, "maximum": other},
                {"enum": list(range(at, at + other))},
                {"type": rng.choice(TYPES)},
            )
        )

    groups = [
        {rng.choice(("anyOf", "oneOf")): [part(i, j) for i in range(first)]} for j in range(second)
    ]
    return {"allOf": groups}


def _bounded(rng: random.Random) -> Any:
    """Return numbers between bounds at the edges, or multiples there."""
    made: dict[str, Any] = {"type": rng.choice(("integer", "number", ["integer", "null"]))}
    for keyword in rng.sample(_NUMBERS, rng.randrange(1, 4)):
        made[keyword] = number(rng)
    if rng.random() < 0.3:
        made = {"anyOf": [made, {"const": number(rng)}, {"enum": [number(rng), number(rng)]}]}
    return made


def _repeated(rng: random.Random) -> Any:
    """Return counts within counts."""
    made: Any = _keywords(rng, 1)
    for _ in range(rng.randrange(1, 5)):
        low, high = sorted((count(rng), count(rng)))
        made = rng.choice(
            (
                {"type": "array", "items": made, "minItems": low, "maxItems": high},
                {
                    "type": "string",
                    "minLength": low,
                    "maxLength": high,
                    "pattern": draw_pattern(rng),
                },
                {
                    "type": "object",
                    "additionalProperties": made,
                    "minProperties": low,
                    "maxProperties": high,
                },
                {"type": "array", "contains": made, "minContains": low, "maxContains": high},
                {"type": "array", "items": made, "minItems": high, "uniqueItems": True},
            )
        )
    return made


_SHAPES: tuple[Callable[[random.Random], Any], ...]
_SHAPES = (_deep, _chain, _chain, _web, _wide, _products, _bounded, _bounded, _repeated)

_VALUES: dict[str, Callable[[random.Random], Any]] = {
    "type": lambda rng: rng.choice((*TYPES, rng.sample(TYPES, 3), ["string", "string"], "any", [])),
    "enum": lambda rng: [_literal(rng, 2) for _ in range(rng.choice((0, 1, 3, 10)))],
    "examples": lambda rng: [_literal(rng, 1)],
    "format": lambda rng: rng.choice(FORMATS),
    "required": lambda rng: [_text(rng) for _ in range(rng.choice((0, 1, 3, 300)))],
    "dependentRequired": lambda rng: {_text(rng): [_text(rng)]},
    "x-guidance": _options,
    "pattern": draw_pattern,
    **dict.fromkeys(("const", "default"), lambda rng: _literal(rng, 3)),
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef", "$id", "$schema"), _reference),
    **dict.fromkeys(("$anchor", "$dynamicAnchor"), lambda rng: rng.choice(("a", "b", "", "#a"))),
    **dict.fromkeys(_FLAGS, lambda rng: rng.random() < 0.7),
    **dict.fromkeys(("discriminator", "$vocabulary"), lambda rng: {"propertyName": _text(rng)}),
}
"""Generators of values for keywords that hold no schema; others get a text."""
