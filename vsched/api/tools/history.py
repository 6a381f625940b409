"""Tool calls in the messages that a client sends back, in the form that chat templates read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from vsched.api.errors import out_of_bounds
from vsched.api.request_schema import ToolCall

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_DEPTH_MAX = 32


def template_calls(calls: Sequence[ToolCall], param: str) -> list[dict[str, Any]]:
    """Return calls whose arguments are objects: templates write them as JSON, and would quote a text once more.

    Raises:
        ParameterRefused: When a name or arguments are none; names the call.
    """
    found: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        where = f"{param}[{index}].function"
        name = call.function.name
        if _NAME.fullmatch(name) is None:
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


def _arguments(sent: str | dict[str, Any], param: str) -> dict[str, Any]:
    found: Any = sent
    if isinstance(sent, str):
        try:
            found = msgspec.json.decode(sent) if sent.strip() else {}
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            found = None
    if not isinstance(found, dict) or _deeper(found, _DEPTH_MAX):
        raise out_of_bounds(
            param,
            value=f"a text of {len(sent)} characters" if isinstance(sent, str) else "an object",
            limit=f"one JSON object, nested at most {_DEPTH_MAX} deep",
            remedy="send the arguments as the model's call held them",
        )
    return found


def _deeper(value: object, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_deeper(one, depth - 1) for one in inner)
