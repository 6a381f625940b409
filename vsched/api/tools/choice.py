"""Tools of a request: those shown to the model, and those that it may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
from vsched.api.tools.formats import CallFormat, call_format
from vsched.api.tools.grammar import forced_calls
from vsched.api.unsupported import unsupported_type

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
    functions = _functions(request.tools or [], settings)
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


def shown_tools(tools: Sequence[Tool], settings: ApiSettings) -> list[dict[str, Any]]:
    """Convert tools for chat templates.

    Raises:
        ParameterRefused: If a tool is invalid.
    """
    return [_shown(each) for each in _functions(tools, settings)]


def _functions(tools: Sequence[Tool], settings: ApiSettings) -> list[FunctionTool]:
    check_count("tools", len(tools), settings.tools_max, "tools")
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    _check_names([function.name for function in functions])
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


def _check_names(names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            message = f"two tools are called {name}. Remedy: give each tool a different name."
            raise ParameterRefused(message, param=f"tools[{index}].function.name")


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
