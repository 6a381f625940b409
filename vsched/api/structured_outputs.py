"""Structured output: OpenAI's `response_format` and vLLM's fields, converted to the grammar of a request.

Only the format of the fields is checked here. The engine compiles the grammar later, in a thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from vsched.api.errors import ParameterRefused, unsupported
from vsched.api.request_schema import JsonSchema, ResponseFormat, SamplingFields, StructuredOutputs


class Constraint(NamedTuple):
    """Grammar of a request, and the parameter that it comes from."""

    param: str
    grammar: str


_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def constraint_from_schema(schema: JsonSchema) -> str:
    """Grammar of JSON values that match a schema; properties in its order."""
    return _encoded(json_schema=schema)


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
        message = "`response_format` has no JSON schema. Remedy: send it as schema."
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
