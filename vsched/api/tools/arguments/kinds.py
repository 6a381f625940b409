"""Types of arguments from their schemas: some formats write strings without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_REFERENCES_MAX = 8
WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
"""Python's constants: templates that use them teach models to write them."""
_NAMES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve a schema's reference within `root`; empty if the target is not found."""
    for _ in range(_REFERENCES_MAX):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root if reference.startswith("#") else None
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return {}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Types that a schema allows; empty if it does not specify them."""
    known = resolved(schema, root)
    said = known.get("type")
    if isinstance(said, str):
        return frozenset([said])
    if isinstance(said, list):
        return frozenset(each for each in said if isinstance(each, str))
    for key in ("enum", "const"):
        if key in known:
            values = known[key] if key == "enum" else [known[key]]
            return frozenset(map(type_name, values if isinstance(values, list) else []))
    for key in ("anyOf", "oneOf"):
        options = known.get(key)
        if isinstance(options, list) and options:
            found = [types_of(each, root) for each in options]
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def type_name(value: object) -> str:
    """JSON schema type of a value."""
    if value is None:
        return "null"
    return _NAMES.get(type(value), "string")


def quoted(text: str) -> str:
    """Escape a text, or a piece of one, for a JSON string."""
    return msgspec.json.encode(text.encode("utf-8", "replace").decode()).decode()[1:-1]


def json_of(text: str, types: frozenset[str]) -> str:
    """Convert a value without quotes to JSON.

    A value whose type the schema does not allow becomes a string.
    """
    stripped = text.strip()
    stripped = WORDS.get(stripped, stripped)
    try:
        name = type_name(msgspec.json.decode(stripped))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        name = "string"
    fits = name in types or (name == "integer" and "number" in types)
    if name != "string" and (fits or "string" not in types):
        return stripped
    return f'"{quoted(text)}"'
