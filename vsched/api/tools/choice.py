"""Tools of a request: those shown to the model, and those that it may or must call.

Grammar of forced tool calls: the literals of the format around values that match a function's schema.

The grammar is sent to workers as a tree of literals, schemas and texts, and converted for their grammar library there:

- a string is a literal;
- `all` is a sequence of parts, `any` a choice of parts;
- `many` is a repeated part, with a separator `between`;
- `schema` is JSON that matches it, `rule` a named part;
- `text` is any text up to the first `end` that does not contain `without`.

In formats other than JSON, lists and objects are written as JSON: the parsers of those formats accept JSON, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vsched.api.contract import ApiSettings
from vsched.api.errors import ParameterRefused, check_count, out_of_bounds, shown
from vsched.api.request_schema import (
    NAME,
    ChatRequest,
    FunctionTool,
    NamedTool,
    Tool,
    ToolChoice,
    deeper,
)
from vsched.api.tools.arguments import alternatives, resolved, types_of
from vsched.api.tools.formats import CallFormat, TaggedArguments, ValueArguments, call_format
from vsched.api.unsupported import unsupported_type

Node = str | dict[str, Any]

TOOLS_MAX = 128
"""Maximum tools of a request."""

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NOTES = frozenset(
    ["title", "description", "default", "examples", "$defs", "definitions", "$schema", "$id"]
)
_NOT_LISTED = frozenset(
    [
        "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "minProperties",
        "propertyNames", "dependentRequired", "dependentSchemas",
    ]
)  # fmt: skip
"""Constraints on all arguments together that cannot be expressed as a list of arguments."""


def forced_calls(known: CallFormat, functions: Sequence[FunctionTool], *, single: bool) -> str:
    """Grammar of one call, or of one or more calls, of these functions.

    Raises:
        ParameterRefused: If a schema has constraints on all arguments that this format cannot enforce.
    """
    rules: dict[str, Node] = {}
    calls = [_call(known, each, rules) for each in functions]
    opening = known.opening + known.first
    call: Node = {"any": calls}
    several = not (single or known.alone)
    if several and known.shared:
        call = {"many": call, "between": known.between}
    call = _all(opening, call, known.closing if not known.alone else "")
    if several and not known.shared:
        call = {"many": call, "between": known.between}
    return msgspec.json.encode({"calls": {"start": call, "rules": rules}}).decode()


def _call(known: CallFormat, function: FunctionTool, rules: dict[str, Node]) -> Node:
    # Without a type, a schema with `properties` allows numbers and strings as well; arguments are an object.
    schema = {"type": "object", **(function.parameters or _NO_ARGUMENTS)}
    before = f"{known.before}{function.name}{known.middle}"
    if known.arguments is None:
        return _all(before, {"schema": schema}, known.after)
    root = resolved(schema, schema)
    if unlisted := sorted(_NOT_LISTED & root.keys()):
        message = (
            f"the parameters of {function.name} have `{unlisted[0]}` next to their properties, which calls in this "
            "model's form cannot be held to. Remedy: list the properties, or leave the call to the model (auto)."
        )
        raise ParameterRefused(message, param="tools", code="invalid_grammar")
    return _all(before, _Arguments(known.arguments, schema, rules).arguments(root), known.after)


def _all(*parts: Node) -> Node:
    return {"all": [part for part in parts if part != ""]}


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Name and schema of each property, and whether it is required."""
    known = schema.get("properties")
    known = known if isinstance(known, dict) else {}
    needed = schema.get("required")
    needed = [each for each in needed if isinstance(each, str)] if isinstance(needed, list) else []
    names = [*known, *(each for each in dict.fromkeys(needed) if each not in known)]
    return [(name, known.get(name, {}), name in needed) for name in names]


def _options(schema: Mapping[str, Any]) -> list[Any] | None:
    """Alternative schemas of a value; None if the schema is not a plain union."""
    for key in ("anyOf", "oneOf"):
        if set(schema) - _NOTES == {key} and isinstance(schema[key], list) and schema[key]:
            return list(schema[key])
    kinds = schema.get("type")
    if isinstance(kinds, list) and kinds and "enum" not in schema and "const" not in schema:
        return [{**schema, "type": kind} for kind in kinds]
    return None


class _Arguments:
    """Arguments between tags, or with assignments and commas; lists and objects within them are JSON."""

    def __init__(
        self,
        form: TaggedArguments | ValueArguments,
        root: Mapping[str, Any],
        rules: dict[str, Node],
    ) -> None:
        self._form = form
        self._root = root
        self._rules = rules

    def arguments(self, schema: Mapping[str, Any]) -> Node:
        """Arguments of one function, including brackets, in the order of its schema."""
        form = self._form
        if isinstance(form, ValueArguments):
            return _all(form.opening, self._assigned(form, schema), form.closing)
        parts = []
        for name, each, needed in _properties(schema):
            part = _all(f"{form.before}{name}{form.middle}", self._value(each, form.after))
            parts.append(part if needed else {"any": [part, ""]})
        return _all(*parts)

    def _assigned(self, form: ValueArguments, schema: Mapping[str, Any]) -> Node:
        """Names and values, with commas between those present."""
        rest: Node = ""
        first: Node = ""
        for name, each, needed in reversed(_properties(schema)):
            item = self._rule(_all(name + form.assign, self._value(each, "")))
            started = _all(item, rest)
            first = started if needed else {"any": [started, first]}
            more = _all(form.comma, item, rest)
            rest = self._rule(more if needed else {"any": [more, rest]})
        return first

    def _rule(self, node: Node) -> Node:
        name = f"part_{len(self._rules)}"
        self._rules[name] = node
        return {"rule": name}

    def _value(self, schema: Any, after: str) -> Node:
        """A value and the text after it."""
        found = [self._one(each, after) for each in alternatives(schema, self._root, _options)]
        if not found:
            message = "a schema of `tools` refers to itself alone. Remedy: list the alternatives."
            raise ParameterRefused(message, param="tools", code="invalid_grammar")
        return found[0] if len(found) == 1 else {"any": found}

    def _one(self, schema: Any, after: str) -> Node:
        """A value of a schema that is no union, and the text after it."""
        if not isinstance(schema, Mapping):
            return _all(self._json({"allOf": [schema]}), after)
        form = self._form
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            if isinstance(values, list) and values:
                return {"any": [written_value(form, each) + after for each in values]}
        if isinstance(form, ValueArguments):
            match schema.get("type"):
                case "boolean":
                    return {"any": [form.words[0], form.words[1]]}
                case "null":
                    return form.words[2]
                case "string" if form.raw_quotes:
                    quote = form.raw_quotes[0]
                    return _all(quote, _text(schema, quote, without=quote))
            return self._json(schema)
        types = types_of(schema, self._root)
        if types and "string" not in types:
            return _all(self._json(schema), after)
        end = after.rstrip()
        text = _text(schema if schema.get("type") == "string" else {}, end, without=end.strip())
        return _all(text, after[len(end) :])

    def _json(self, schema: Mapping[str, Any]) -> Node:
        """JSON that matches a schema, which may refer to definitions of the root."""
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return {"schema": {**shared, **schema}}


def _text(schema: Mapping[str, Any], end: str, *, without: str) -> Node:
    """Any text up to `end` that matches the schema of a string."""
    said = {
        "least": schema.get("minLength"),
        "most": schema.get("maxLength"),
        "pattern": schema.get("pattern"),
    }
    held = {key: value for key, value in said.items() if value is not None}
    return {"text": {"end": end, "without": without, **held}}


def written_value(form: TaggedArguments | ValueArguments, value: Any) -> str:
    """Write a JSON value in the argument format."""
    if isinstance(form, TaggedArguments):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    match value:
        case bool():
            return form.words[0] if value else form.words[1]
        case None:
            return form.words[2]
        case str() if form.raw_quotes:
            return f"{form.raw_quotes[0]}{value}{form.raw_quotes[0]}"
    return json.dumps(value, ensure_ascii=False)


_FORCING = "required"
_DEPTH_MAX = 64


class ToolUse(msgspec.Struct, frozen=True):
    """Tools of a request.

    Attributes:
        format: Tool-call format of the model; None if the checkpoint has its own parser.
        functions: Functions shown to the model.
        forced: Functions of which one must be called; empty if no call is required.
        single: At most one call is allowed.
    """

    format: CallFormat | None
    functions: Sequence[FunctionTool]
    forced: Sequence[FunctionTool]
    single: bool

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The functions for the template, without fields that models were not trained on, such as `strict`."""
        return [_shown(each) for each in self.functions]

    @property
    def grammar(self) -> str:
        """Grammar of forced calls in the model's format; empty if no call is required."""
        if self.format is None or not self.forced:
            return ""
        return forced_calls(self.format, self.forced, single=self.single)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Argument schemas by function name."""
        return {each.name: each.parameters or {} for each in self.functions}


def tool_use(
    request: ChatRequest, settings: ApiSettings, template: str, *, parsed: bool = False
) -> ToolUse | None:
    """Tools of a request; None if there are none to call.

    `parsed` means that the checkpoint has its own parser; then calls cannot be forced.

    Raises:
        ParameterRefused: If a tool or the choice is invalid, or the tool-call format is unknown.
    """
    choice = request.tool_choice
    functions = _functions(request.tools or [])
    if choice == "none" or (not functions and choice in (None, "auto")):
        return None
    if not functions:
        message = "`tool_choice` needs `tools`. Remedy: send the tools, or no tool_choice."
        raise ParameterRefused(message, param="tool_choice")
    allowed, mode = _allowed(choice, functions)
    known = call_format(settings.tool_format, template)
    forced = _forced(mode, allowed)
    if known is None and (forced or not parsed):
        message = (
            "the tool-call format of this model is unknown. "
            "Remedy: set model.tool_format, or send no tools."
        )
        raise ParameterRefused(message, param="tools", code="tools_not_supported")
    return ToolUse(
        known,
        functions=allowed,
        forced=forced,
        single=isinstance(mode, NamedTool) or request.parallel_tool_calls is False,
    )


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Convert tools for chat templates.

    Raises:
        ParameterRefused: If a tool is invalid.
    """
    return [_shown(each) for each in _functions(tools)]


def _functions(tools: Sequence[Tool]) -> list[FunctionTool]:
    check_count("tools", len(tools), TOOLS_MAX, "tools")
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            message = f"two tools are called {name}. Remedy: give each tool a different name."
            raise ParameterRefused(message, param=f"tools[{index}].function.name")
    return functions


def _function(tool: Tool, where: str) -> FunctionTool:
    """Validate a tool and return its function.

    Raises:
        ParameterRefused: If it is another type of tool, or the function is invalid.
    """
    function = tool.function
    if tool.type != "function" or function is None:
        raise unsupported_type(tool.type, where) or out_of_bounds(
            f"{where}.type",
            value="no function" if tool.type == "function" else shown(tool.type),
            limit="function",
            remedy="describe each tool as a function",
        )
    if re.fullmatch(NAME, function.name, re.ASCII) is None:
        raise out_of_bounds(
            f"{where}.function.name",
            value=f"a text of {len(function.name)} characters",
            limit="1 to 128 letters, digits and _ . : / -",
            remedy="give the function a name of this form",
        )
    if deeper(function.parameters, _DEPTH_MAX):
        raise out_of_bounds(
            f"{where}.function.parameters",
            value="a schema",
            limit=f"nested at most {_DEPTH_MAX} deep",
            remedy="simplify the schema",
        )
    kind = (function.parameters or {}).get("type", "object")
    if kind != "object":
        raise out_of_bounds(
            f"{where}.function.parameters.type",
            value=str(kind)[:40],
            limit="object",
            remedy="give the schema of an object whose properties are the arguments",
        )
    return function


def _allowed(
    choice: str | ToolChoice | None, functions: list[FunctionTool]
) -> tuple[list[FunctionTool], str | NamedTool]:
    """Functions that a tool choice allows, and the mode or the chosen function."""
    if not isinstance(choice, ToolChoice):
        if choice not in {None, "auto", _FORCING}:
            raise _no_choice(shown(choice))
        return functions, choice or "auto"
    if choice.type == "function" and choice.function is not None:
        return functions, _known(choice.function, functions)
    allowed = choice.allowed_tools
    if choice.type != "allowed_tools" or allowed is None or allowed.mode not in {"auto", _FORCING}:
        raise unsupported_type(choice.type, "tool_choice") or _no_choice(
            f"type {shown(choice.type)}"
        )
    names = {_known(tool.function, functions).name for tool in allowed.tools if tool.function}
    if not names:
        raise _no_choice("no allowed tool")
    return [each for each in functions if each.name in names], allowed.mode


def _known(named: NamedTool, functions: Sequence[FunctionTool]) -> NamedTool:
    if all(named.name != function.name for function in functions):
        message = "`tool_choice` names a function that is not in `tools`. Remedy: name one of these, or send its tool."
        raise ParameterRefused(message, param="tool_choice")
    return named


def _no_choice(value: str) -> ParameterRefused:
    return out_of_bounds(
        "tool_choice",
        value=value,
        limit="none, auto, required, a function's name, or allowed_tools",
        remedy="send one of these in OpenAI's format",
    )


def _forced(mode: str | NamedTool, allowed: Sequence[FunctionTool]) -> Sequence[FunctionTool]:
    if isinstance(mode, NamedTool):
        return [function for function in allowed if function.name == mode.name]
    return allowed if mode == _FORCING else ()


def _shown(function: FunctionTool) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": shown}
