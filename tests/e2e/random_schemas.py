"""Random JSON schemas, damage to them, and a validator for the keywords in them."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

_KINDS = ("enum", "const", "integer", "number", "boolean", "null", "string", "pattern")
_ODD: list[Any] = [
    None, -1, 10**12, "x", "(", [], {}, True, 1.5, {"$ref": "#/nowhere"}, ["string", 3], "😀" * 3
]  # fmt: skip
_KEYS = (
    "type", "enum", "minimum", "maxLength", "items", "properties", "required", "pattern", "anyOf",
    "$ref", "format", "not", "if", "minItems", "x-guidance",
)  # fmt: skip


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return a schema whose values are of bounded length."""
    kind = rng.choice(_KINDS + (("object", "array", "anyOf") * 2 if depth else ()))
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
            return {
                "type": "string",
                "pattern": rng.choice(["^[a-f]{2,3}$", "^(x|yz)$", r"^\d\d-\d$"]),
            }
        case "object":
            names = rng.sample(["a", "b c", "ü", "d", 'q"'], rng.randrange(1, 4))
            properties = {name: random_schema(rng, depth - 1) for name in names}
            required = names[: rng.randrange(len(names) + 1)]
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        case "array":
            return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": 2}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return {"type": kind}


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


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Return True if a value matches a schema of this module."""
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return any(value == each and type(value) is type(each) for each in values)
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    match schema["type"]:
        case "integer" | "number" as kind:
            whole = type(value) is int or (kind == "number" and type(value) is float)
            return whole and bool(schema["minimum"] <= value <= schema["maximum"])
        case "string":
            if not isinstance(value, str):
                return False
            if "pattern" in schema:
                return re.search(schema["pattern"], value) is not None
            return bool(len(value) <= schema["maxLength"])
        case "array":
            is_list = isinstance(value, list) and len(value) <= schema["maxItems"]
            return is_list and all(fits(each, schema["items"]) for each in value)
        case "object":
            known = isinstance(value, dict) and value.keys() <= schema["properties"].keys()
            return (
                known
                and set(schema["required"]) <= value.keys()
                and all(fits(value[name], schema["properties"][name]) for name in value)
            )
        case "null":
            return value is None
    return isinstance(value, bool)
