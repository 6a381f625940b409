"""Scripts of responses, and the events that a compatibility layer makes from them."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.unit.api.fakes import FakeEngine, Reply
from vsched.aio.streams import OutputDelta
from vsched.api.request_schema import ChatRequest

CALLS = (
    'Look.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {"b": "ü"}}\n</tool_call>'
)


def saying(
    text: str, finish: str = "stop", *, size: int = 7, stop_string: str | None = None
) -> FakeEngine:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    last = OutputDelta("", [0], finish_reason=finish, stop_string=stop_string)
    return FakeEngine(*(OutputDelta(piece, [1]) for piece in pieces), last)


def named_events(reply: Reply) -> list[Any]:
    """Return the events of a stream whose names are their types, and which has no end marker."""
    found: list[Any] = []
    *events, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        found.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def plain(request: ChatRequest) -> list[dict[str, Any]]:
    """Return messages as builtins, without unset fields."""
    found: list[dict[str, Any]] = _without_unset(msgspec.to_builtins(request.messages))
    return found


def _without_unset(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_unset(each) for key, each in value.items() if each is not None}
    return [_without_unset(each) for each in value] if isinstance(value, list) else value
