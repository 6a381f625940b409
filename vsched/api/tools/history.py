"""Tool calls in the messages that a client sends back, in the form that chat templates read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from vsched.api.errors import out_of_bounds
from vsched.api.request_schema import Message, ToolCall
from vsched.api.tools.formats import NAME

ARGUMENTS_CHARACTERS_MAX = 1024 * 1024
"""Arguments of all calls of one request, as texts: what the JSON in them takes to decode is bounded by that."""
_OBJECT_CHARACTERS = 16_384
"""An object counts as a text of this length: that it holds more was bounded when the body was read."""
_DEPTH_MAX = 32
INVALID_JSON = "INVALID_JSON"
"""The single argument of a call whose arguments are not a JSON object, such as truncated ones, as Anthropic advises."""


def arguments_characters(calls: Sequence[ToolCall]) -> int:
    """Return how many characters of JSON these calls hold as texts."""
    sent = [call.function.arguments or "" for call in calls]
    return sum(len(each) if isinstance(each, str) else _OBJECT_CHARACTERS for each in sent)


def check_arguments(messages: Sequence[Message]) -> None:
    """Refuse calls whose arguments would take long to decode.

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
    """Return messages whose calls are as a template reads them.

    Blocks: for the time that decoding their arguments takes; off the event loop for long ones.

    Raises:
        ParameterRefused: When a name is not valid, or arguments are nested too deeply; names the call.
    """
    return [
        {**message, "tool_calls": _calls(message["tool_calls"], f"messages[{index}].tool_calls")}
        if "tool_calls" in message
        else message
        for index, message in enumerate(messages)
    ]


def _calls(calls: Sequence[ToolCall], param: str) -> list[dict[str, Any]]:
    """Return calls whose arguments are objects: templates write them as JSON, and would quote a text once more."""
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
            remedy="send the arguments as the model's call held them",
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
    """Return whether a JSON value is nested deeper than that."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(deeper(one, depth - 1) for one in inner)
