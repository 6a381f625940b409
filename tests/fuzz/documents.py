"""Hostile schemas and grammars, and requests with them in every field that takes one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.fuzz.patterns import draw_pattern
from tests.fuzz.rules import draw_gbnf, draw_lark
from tests.fuzz.schemas import DUPLICATE, TEXTS, draw_schema

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
Body = dict[str, Any]


class Document(NamedTuple):
    """A schema, or a text in one of the other grammar languages."""

    kind: str
    value: Any


class Asked(NamedTuple):
    """A request with a document, and the field that contains it."""

    document: Document
    door: str
    path: str
    body: bytes

    @property
    def answers_json(self) -> bool:
        """Return True if complete output is JSON."""
        return self.document.kind == "schema"


def draw_document(rng: random.Random) -> Document:
    """Draw a document; half of them are schemas."""
    (kind,) = rng.choices(tuple(_KINDS), (10, 5, 2, 3, 1))
    return Document(kind, _KINDS[kind](rng))


def draw_asked(rng: random.Random, model: str) -> Asked:
    """Draw a request with a document: mostly for a few tokens, at times for more, to test ranks with it."""
    document = draw_document(rng)
    tokens = rng.choice((1, 2, 4, 4, 8, 8, 16, 64))
    field = "json" if document.kind == "schema" else _FIELDS[document.kind]
    doors: dict[str, tuple[str, Body]] = {
        "guided": (TEXT, {"prompt": "1", f"guided_{field}": document.value}),
        "structured_outputs": (CHAT, {"structured_outputs": {field: document.value}}),
    }
    if document.kind == "schema":
        doors.update(at_doors(document.value, text=rng.random() < 0.3))
    door = rng.choice(list(doors))
    path, fields = doors[door]
    fields["temperature"] = rng.choice((0.0, 1.0, 1.5))
    sent = json.dumps(body_at(path, fields, model=model, tokens=tokens)).replace(DUPLICATE, "")
    return Asked(document, door, path, sent.encode())


def body_at(path: str, fields: Body, *, model: str, tokens: int) -> Body:
    """Return a request body with these fields, and the further fields that the path requires."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    messages = {} if path in {TEXT, RESPONSES} else {"messages": [{"role": "user", "content": "1"}]}
    return {"model": model, limit: tokens, **messages, **fields}


def at_doors(schema: Any, *, text: bool = False) -> dict[str, tuple[str, Body]]:
    """Return the path and the fields of each way to send a schema; with `text`, as JSON text if the field allows it."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    function = {"name": "f", "parameters": parameters}
    tool = {"type": "function", "function": function}
    named = {"type": "function", "function": {"name": "f"}}
    held = {"type": "json_schema", "name": "s", "schema": schema}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {
        "guided": (TEXT, {"prompt": "1", "guided_json": json.dumps(schema) if text else schema}),
        "structured_outputs": (CHAT, {"structured_outputs": {"json": schema}}),
        "response_format": (CHAT, {"response_format": form}),
        "json_object": (CHAT, {"response_format": {"type": "json_object", "schema": schema}}),
        "tools": (CHAT, {"tools": [tool], "tool_choice": "required"}),
        "named tool": (CHAT, {"tools": [tool], "tool_choice": named}),
        "bare tool": (CHAT, {"tools": [_bare(schema)], "tool_choice": "required"}),
        "responses": (RESPONSES, {"input": "1", "text": {"format": held}}),
        "tools of responses": (
            RESPONSES,
            {"input": "1", "tools": [{"type": "function", **function}], "tool_choice": "required"},
        ),
        "messages": (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        "tools of messages": (
            MESSAGES,
            {"tools": [{"name": "f", "input_schema": parameters}], "tool_choice": {"type": "any"}},
        ),
    }


def _bare(schema: Any) -> Body:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def _choice(rng: random.Random) -> Any:
    size = rng.choice((0, 1, 3, 50, 3000))
    made: list[Any] = [
        rng.choice(TEXTS) if rng.random() < 0.5 else f"{at:05}" for at in range(size)
    ]
    return rng.choice((made, made, made, [*made, 3], ["a", "a"], ["x" * 60_000], "a"))


_KINDS: dict[str, Callable[[random.Random], Any]] = {
    "schema": draw_schema,
    "lark": draw_lark,
    "gbnf": draw_gbnf,
    "regex": draw_pattern,
    "choice": _choice,
}
_FIELDS = {"lark": "grammar", "gbnf": "grammar", "regex": "regex", "choice": "choice"}
