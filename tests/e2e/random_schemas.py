"""Random JSON schemas, and damage to them."""

from __future__ import annotations

import copy
import random
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
