"""What a schema says of one argument: whether it is a text, which some forms write without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_REFERENCES_MAX = 8
WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
"""What Python calls some values: templates that write them by their Python names teach models to."""
_NAMES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a schema is, or what it refers to within `root`; nothing where that is not found."""
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
    """Return the types that a schema allows; none where it does not say."""
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
    """Return the name of a value's type in a schema."""
    if value is None:
        return "null"
    return _NAMES.get(type(value), "string")


def quoted(text: str) -> str:
    """Return a text, or a piece of one, as it stands between the quotes of JSON."""
    return msgspec.json.encode(text.encode("utf-8", "replace").decode()).decode()[1:-1]


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written without quotes.

    What is no value of the types that the schema allows is a text.
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
