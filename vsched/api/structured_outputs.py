"""Structured output: OpenAI's `response_format` and vLLM's fields, converted to the grammar of a request.

Only the format of the fields is checked here. The engine compiles the grammar later, in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from vsched.aio.grammar_checks import GRAMMAR_BYTES_MAX
from vsched.api.errors import ParameterRefused, unsupported
from vsched.api.request_schema import (
    JsonSchema,
    ResponseFormat,
    SamplingFields,
    StructuredOutputs,
)


class Constraint(NamedTuple):
    """Grammar of a request, and the parameter that it comes from."""

    param: str
    grammar: str


_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def constraint_from_schema(schema: JsonSchema) -> str:
    """Grammar of JSON values that match a schema; properties in its order, and no additional ones."""
    sent = _encoded(json_schema=schema)
    if len(sent) > GRAMMAR_BYTES_MAX:
        return sent  # will be refused for its size
    return _encoded(json_schema=closed(schema) if isinstance(schema, dict) else schema)


def constraint_of(request: SamplingFields) -> Constraint | None:
    """Constraint on the output of a request, or None.

    Raises:
        ParameterRefused: If several parameters constrain the output, or one is malformed.
    """
    found = [
        *_of_response_format(request.response_format),
        *_of_structured_outputs("structured_outputs", request.structured_outputs),
        *_of_structured_outputs("guided_", _guided(request)),
    ]
    if len(found) > 1:
        names = " and ".join(f"`{each.param}`" for each in found)
        message = f"{names} each constrain the output. Remedy: send only one of them."
        raise ParameterRefused(message, param=found[1].param)
    return found[0] if found else None


def with_forced_calls(constraint: Constraint | None, calls: str) -> Constraint:
    """Constraint that forces tool calls; it replaces `response_format`, because calls have no content.

    Raises:
        ParameterRefused: If another parameter constrains the output.
    """
    if constraint is not None and constraint.param != "response_format":
        message = f"`tool_choice` and `{constraint.param}` each constrain the output. Remedy: send only one of them."
        raise ParameterRefused(message, param=constraint.param)
    return Constraint("tools", calls)


def after_reasoning(constraint: Constraint, end: str) -> Constraint:
    """Let the model finish begun reasoning, up to `end`, and apply the constraint afterwards."""
    thought = {"end": end, "answer": msgspec.Raw(constraint.grammar.encode())}
    return constraint._replace(grammar=_encoded(thought=thought))


def _guided(request: SamplingFields) -> StructuredOutputs:
    """Convert vLLM's older fields to the newer ones."""
    if request.guided_whitespace_pattern is not None:
        raise unsupported("guided_whitespace_pattern", remedy="leave it out")
    return StructuredOutputs(
        json=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
    )


def _of_response_format(requested: ResponseFormat | None) -> list[Constraint]:
    if requested is None or requested.type == "text":
        return []
    if requested.type == "json_object":
        schema = _ANY_OBJECT if requested.schema is None else requested.schema
        return [Constraint("response_format", constraint_from_schema(schema))]
    if requested.type != "json_schema":
        remedy = "send text, json_object or json_schema as its type"
        raise unsupported("response_format.type", remedy=remedy)
    if requested.json_schema is None or requested.json_schema.schema is None:
        message = "`response_format.json_schema.schema` is missing. Remedy: send it."
        raise ParameterRefused(message, param="response_format")
    return [Constraint("response_format", constraint_from_schema(requested.json_schema.schema))]


def _of_structured_outputs(name: str, requested: StructuredOutputs | None) -> list[Constraint]:
    """Constraints from vLLM's fields; `name` is the name of the field, or the prefix of the older names."""
    if requested is None:
        return []
    prefix = name if name.endswith("_") else f"{name}."
    if requested.structural_tag is not None:
        raise unsupported(f"{prefix}structural_tag", remedy="send a json schema or a grammar")
    for option in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(requested, option):
            raise unsupported(prefix + option, remedy="leave it out, and express it in the schema")
    found: list[Constraint] = []
    if requested.json is not None:
        schema = _schema(requested.json, prefix + "json")
        found.append(Constraint(prefix + "json", constraint_from_schema(schema)))
    if requested.json_object:
        found.append(Constraint(prefix + "json_object", constraint_from_schema(_ANY_OBJECT)))
    if requested.regex is not None:
        found.append(Constraint(prefix + "regex", _encoded(regex=requested.regex)))
    if requested.choice is not None:
        if not requested.choice or not all(requested.choice):
            message = (
                f"`{prefix}choice` must be a list of non-empty texts. Remedy: send at least one."
            )
            raise ParameterRefused(message, param=prefix + "choice")
        found.append(Constraint(prefix + "choice", _encoded(choice=requested.choice)))
    if requested.grammar is not None:
        found.append(Constraint(prefix + "grammar", _encoded(grammar=requested.grammar)))
    return found


def _schema(value: str | JsonSchema, param: str) -> JsonSchema:
    """Decode a schema that may be sent as text.

    Raises:
        ParameterRefused: If the text is not a JSON object.
    """
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        message = f"`{param}` is not a JSON schema. Remedy: send a JSON object, or its text."
        raise ParameterRefused(message, param=param) from None


def _encoded(**kind: object) -> str:
    return msgspec.json.encode(kind).decode()


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
