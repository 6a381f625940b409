"""Random JSON schemas, damage to them, and a validator with exact numbers for the keywords in them."""

from __future__ import annotations

import copy
import random
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

_KINDS = ("enum", "const", "integer", "number", "boolean", "null", "string", "pattern")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ODD: list[Any] = [
    None, -1, 10**12, "x", "(", [], {}, True, 1.5, {"$ref": "#/nowhere"}, ["string", 3], "😀" * 3,
    -(2**63), 10**400, {"a": 2**53 + 1}, [{}] * 50, "[]",
]  # fmt: skip
_KEYS = (
    "type", "enum", "minimum", "maxLength", "items", "properties", "required", "pattern", "anyOf", "oneOf", "allOf",
    "$ref", "format", "not", "if", "minItems", "x-guidance", "propertyNames", "discriminator", "multipleOf",
)  # fmt: skip


def random_schema(rng: random.Random, depth: int, *, edges: bool = False) -> dict[str, Any]:
    """Return a schema whose values are of bounded length.

    With `edges`, it may also have numbers at the edges of types, options and references to `#/$defs/shared`; such a
    schema may be refused.
    """
    kinds: list[str] = [*_KINDS, *(("object", "array", "anyOf") * 2 if depth else ())]
    if edges:
        kinds += ["edges"] * 5 + (["oneOf", "allOf", "$ref"] if depth else [])
    return _of_kind(rng.choice(kinds), rng, depth, edges)


def _of_kind(kind: str, rng: random.Random, depth: int, edges: bool) -> dict[str, Any]:  # noqa: C901
    match kind:
        case "enum":
            return {"enum": rng.sample(["a", 'b"\\', "日本", 3, None, 1.5, "", True, "</a>"], 3)}
        case "const":
            return {"const": rng.choice(["c", 0, False, None, "é'"])}
        case "integer":
            low = rng.randrange(-20, 20)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(50)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 1}
        case "string":
            return {"type": "string", "maxLength": rng.randrange(1, 6)}
        case "pattern":
            pattern = rng.choice(["^[a-f]{2,3}$", "^(x|yz)$", r"^\d\d-\d$", r"^[^\s@]@.$"])
            return {"type": "string", "pattern": pattern}
        case "object":
            names = rng.sample(["a", "b c", "ü", "d", 'q"', "type"], rng.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1, edges=edges) for name in names},
                "required": names[: rng.randrange(len(names) + 1)],
                "additionalProperties": rng.choice([False, {"type": "boolean"}]) and edges,
            }
        case "array":
            return {
                "type": "array",
                "items": random_schema(rng, depth - 1, edges=edges),
                "maxItems": 2,
            }
        case "anyOf" | "oneOf":
            return {kind: [random_schema(rng, depth - 1, edges=edges) for _ in range(2)]}
        case "allOf":
            bound = {rng.choice(_BOUNDS): _number(rng)}
            return {"allOf": [random_schema(rng, depth - 1, edges=True), bound]}
        case "$ref":
            return {"$ref": "#/$defs/shared"}
        case "edges":
            schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
            schema |= {name: _number(rng) for name in rng.sample(_BOUNDS, 2)}
            if rng.random() < 0.2:
                schema["multipleOf"] = rng.choice([1, 2, 0.5, 0.01, 10, 1.5, 0.07])
            return rng.choice([schema, schema, {"enum": [_number(rng), "a"]}])
    return {"type": kind}


def _number(rng: random.Random) -> int | float:
    sign = rng.choice([1, -1])
    return rng.choice(
        [
            rng.randrange(-20, 20),
            sign * ((1 << rng.randrange(50, 66)) + rng.randrange(-3, 4)),
            rng.choice([0, 0.0, -0.0, 0.5, -0.5, 0.25, 3, 3.5, 1e-9, 100]),
            sign * int(10.0 ** rng.randrange(20)) + rng.randrange(-1, 2),
            round(rng.uniform(-10, 10), rng.randrange(1, 6)),
            rng.uniform(-1, 1) * 10.0 ** rng.randrange(-8, 25),
        ]
    )


def damaged(schema: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a schema with random changes, which mostly make it invalid."""
    broken = copy.deepcopy(schema)
    inner = [broken]
    for each in inner:
        below = [*each.get("anyOf", ()), *each.get("properties", {}).values(), each.get("items")]
        inner += [one for one in below if isinstance(one, dict)]
    for _ in range(rng.randrange(1, 4)):
        rng.choice(inner)[rng.choice(_KEYS)] = rng.choice(_ODD)
    return broken


def fits(value: Any, schema: Any, root: Any = None) -> bool:
    """Return True if a value, whose numbers with a point may be `Decimal`, matches a schema of this module."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    kind = _type(value)
    whole = kind == "number" and _exact(value).denominator == 1
    if schema.get("type", kind) not in (kind, "integer" if whole else kind):
        return False
    if "$ref" in schema and not fits(value, root["$defs"]["shared"], root):
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    if not any(_type(each) == kind and _exact(each) == _exact(value) for each in values):
        return False
    matching = {
        key: sum(fits(value, each, root) for each in schema.get(key, ()))
        for key in ("allOf", "anyOf", "oneOf")
    }
    if matching["allOf"] < len(schema.get("allOf", ())):
        return False
    if ("anyOf" in schema and not matching["anyOf"]) or matching["oneOf"] != ("oneOf" in schema):
        return False
    return _fits_kind(value, kind, schema, root)


def _fits_kind(value: Any, kind: str, schema: dict[str, Any], root: Any) -> bool:
    if kind == "number":
        exact = _exact(value)
        held = {key: _exact(schema[key]) for key in (*_BOUNDS, "multipleOf") if key in schema}
        return bool(
            held.get("minimum", exact) <= exact <= held.get("maximum", exact)
            and held.get("exclusiveMinimum", exact - 1) < exact
            and exact < held.get("exclusiveMaximum", exact + 1)
            and (exact / held.get("multipleOf", Fraction(1, 10**40))).denominator == 1
        )
    if kind == "string":
        long = len(value) > schema.get("maxLength", len(value))
        return not long and re.search(schema.get("pattern", ""), value) is not None
    if kind == "array" and "items" in schema:
        return len(value) <= 2 and all(fits(each, schema["items"], root) for each in value)
    if kind == "object" and "properties" in schema:
        listed, rest = schema["properties"], schema["additionalProperties"]
        return set(schema["required"]) <= value.keys() and all(
            fits(each, listed.get(name, rest), root) for name, each in value.items()
        )
    return True


def _type(value: Any) -> str:
    names = {bool: "boolean", str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "number")


def _exact(value: Any) -> Any:
    if _type(value) != "number":
        return value
    return Fraction(Decimal(repr(value)) if isinstance(value, float) else value)
