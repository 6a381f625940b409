"""JSON schemas whose objects have no additional properties, unless the schema allows them explicitly.

JSON schema defaults to the opposite, but schemas are usually not written that way: pydantic, and so instructor and
LangChain, leaves `additionalProperties` out of classes, and a small model that may continue adds properties until its
tokens are used up. vLLM and SGLang close objects as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_BY_NAME = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains")
_BESIDE = frozenset(("$ref", "anyOf", "oneOf"))
_SAYS = frozenset(("additionalProperties", "patternProperties", "minProperties"))
DEPTH_MAX = 64
"""Maximum nesting depth of schemas; deeper ones are left unchanged."""
_ACROSS = frozenset(
    (
        *("allOf", "not", "if", "dependentSchemas", "dependencies", "patternProperties"),
        *("unevaluatedProperties", "propertyNames", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords by which several subschemas apply to one object: one must not forbid properties of another."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with closed objects; unchanged if several subschemas apply to one object."""
    for node, depth in _nodes(schema):
        if depth > DEPTH_MAX:
            return schema
        is_object = "properties" in node or "required" in node
        allowed = node.get("allOf")
        single = isinstance(allowed, list) and len(allowed) == 1 and not is_object
        if (_ACROSS - ({"allOf"} if single else set())) & node.keys():
            return schema
        if is_object and _BESIDE & node.keys():
            return schema
    found = _closed(schema)
    assert isinstance(found, dict)
    return found


def _nodes(schema: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield all objects that are schemas, with their depth."""
    waiting = [(schema, 0)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, dict):
            yield node, depth
            waiting += ((each, depth + 1) for _, each in _parts(node))


def _parts(node: dict[str, Any]) -> Iterator[tuple[tuple[str, str | int | None], Any]]:
    """Yield the direct subschemas with their position: the keyword, and the name or index below it."""
    for keyword, held in node.items():
        if keyword in _BY_NAME and isinstance(held, dict):
            yield from (((keyword, name), each) for name, each in held.items())
        elif (keyword in _LISTS or keyword in {"allOf", "items"}) and isinstance(held, list):
            yield from (((keyword, index), each) for index, each in enumerate(held))
        elif keyword in _SINGLE:
            yield (keyword, None), held


def _closed(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    made: dict[str, Any] = dict(node)
    for (keyword, name), each in _parts(node):
        if name is None:
            made[keyword] = _closed(each)
            continue
        if made[keyword] is node[keyword]:
            made[keyword] = node[keyword].copy()
        made[keyword][name] = _closed(each)
    if _lists_all(node) and not _SAYS & node.keys():
        made["additionalProperties"] = False
    return made


def _lists_all(node: dict[str, Any]) -> bool:
    """True if the schema lists properties, including all required ones."""
    listed, needed = node.get("properties"), node.get("required", [])
    return (
        isinstance(listed, dict)
        and isinstance(needed, list)
        and all(isinstance(name, str) and name in listed for name in needed)
    )
