"""Tool calls in messages from clients, converted for chat templates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from vsched.api.errors import out_of_bounds
from vsched.api.request_schema import Message, ToolCall
from vsched.api.tools.formats import NAME

ARGUMENTS_CHARACTERS_MAX = 1024 * 1024
"""Maximum characters of all argument texts in one request, which limits the time to decode their JSON."""
_OBJECT_CHARACTERS = 16_384
"""Characters that an argument object counts as: its size was limited when the body was read."""
_DEPTH_MAX = 32
INVALID_JSON = "INVALID_JSON"
"""The single argument of a call whose arguments are not a JSON object, such as truncated ones, as Anthropic advises."""


def arguments_characters(calls: Sequence[ToolCall]) -> int:
    """Number of characters in the arguments of these calls."""
    sent = [call.function.arguments or "" for call in calls]
    return sum(len(each) if isinstance(each, str) else _OBJECT_CHARACTERS for each in sent)


def check_arguments(messages: Sequence[Message]) -> None:
    """Reject calls whose arguments would take long to decode.

    Raises:
        ParameterRefused: With the limit.
    """
    characters = sum(arguments_characters(message.tool_calls or ()) for message in messages)
    if characters > ARGUMENTS_CHARACTERS_MAX:
        raise out_of_bounds(
            "messages",
            value=f"{characters} characters of arguments",
            limit=f"{ARGUMENTS_CHARACTERS_MAX} characters of arguments",
            remedy="send fewer calls, or shorten their arguments",
        )


def with_template_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert the tool calls of messages for chat templates.

    Blocks: while arguments are decoded; call it off the event loop for long ones.

    Raises:
        ParameterRefused: If a name is invalid, or arguments are nested too deeply; names the call.
    """
    return [
        {**message, "tool_calls": _calls(message["tool_calls"], f"messages[{index}].tool_calls")}
        if "tool_calls" in message
        else message
        for index, message in enumerate(messages)
    ]


def _calls(calls: Sequence[ToolCall], param: str) -> list[dict[str, Any]]:
    """Convert calls so that arguments are objects: templates write them as JSON, and would quote a string again."""
    found: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        where = f"{param}[{index}].function"
        name = call.function.name
        if re.fullmatch(NAME, name, re.ASCII) is None:
            raise out_of_bounds(
                f"{where}.name",
                value=f"a text of {len(name)} characters",
                limit="1 to 128 letters, digits and _ . : / -",
                remedy="send the name of the function",
            )
        arguments = _arguments(call.function.arguments, f"{where}.arguments")
        function = {"name": name, "arguments": arguments}
        found.append({"id": call.id or "", "type": "function", "function": function})
    return found


def _arguments(sent: str | dict[str, Any] | None, param: str) -> dict[str, Any]:
    found = sent if isinstance(sent, dict) else as_object(sent or "")
    if deeper(found, _DEPTH_MAX):
        raise out_of_bounds(
            param,
            value=f"a text of {len(sent)} characters" if isinstance(sent, str) else "an object",
            limit=f"one JSON object, nested at most {_DEPTH_MAX} deep",
            remedy="send the arguments of the model's call unchanged",
        )
    return found


def as_object(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; text that is not a JSON object becomes the argument `INVALID_JSON`."""
    try:
        found = msgspec.json.decode(arguments.strip() or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = arguments
    if found is None:
        return {}
    return found if isinstance(found, dict) else {INVALID_JSON: arguments}


def deeper(value: object, depth: int) -> bool:
    """True if a JSON value is nested deeper than `depth`."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(deeper(one, depth - 1) for one in inner)
