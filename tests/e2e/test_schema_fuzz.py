"""Random schemas over HTTP: output that matches; or, of those without bounds, a 400 with a clear error."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.schemas import fits, random_schema
from tests.patience import PATIENCE_S
from vsched import Engine
from vsched.api.server import RunningServer

pytestmark = pytest.mark.asyncio(loop_scope="package")

MESSAGES = [{"role": "user", "content": "1"}]
REPEATABLE = settings(derandomize=True, database=None, deadline=None, max_examples=20)
BOUNDLESS: list[Any] = [
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "pattern": "((.{1,500}b?){1,500}c?){1,500}"},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "items": {}, "minItems": 10**6},
    {"enum": [f"{index:04}" * 3 for index in range(2000)]},
    {"allOf": [{"anyOf": [{"pattern": f"a{i}*b{j}"} for i in range(12)]} for j in range(12)]},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"properties": {f"p{index}": {"type": "string"} for index in range(400)}},
    {"not": {}},
    {"type": ["object"], "required": list(map(str, range(300)))},
    True,
    False,
    [],
    "string",
    7,
]


def requested(schema: Any, seed: int, *, as_tool: bool) -> dict[str, Any]:
    """Return the body of a request whose output, or whose call, must match a schema."""
    body: dict[str, Any] = {"model": "nano25", "messages": MESSAGES, "max_tokens": 48, "seed": seed}
    if as_tool:
        parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        function = {"name": "f", "parameters": {**parameters, "additionalProperties": False}}
        return {
            **body,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        }
    held = {"name": "s", "schema": schema}
    return {**body, "response_format": {"type": "json_schema", "json_schema": held}}


def check(client: httpx.Client, schema: Any, seed: int, *, as_tool: bool, known: bool) -> int:
    """Send a request, and check the response; `known` is set if `fits` knows all keywords of the schema."""
    body = json.dumps(requested(schema, seed, as_tool=as_tool))
    headers = {"content-type": "application/json"}
    reply = client.post("/v1/chat/completions", content=body, headers=headers)
    assert reply.status_code in {200, 400}, (schema, reply.text)
    if reply.status_code == 400:
        error = reply.json()["error"]
        assert "Remedy" in error["message"], (schema, error)
        assert "\n" not in error["message"], (schema, error)
        too_long = error["code"] == "context_length_exceeded"  # the prompt shows the tool
        assert not known or (as_tool and too_long), (schema, error)
        return 400
    (choice,) = reply.json()["choices"]
    if choice["finish_reason"] == "length":
        return 200
    calls = choice["message"].get("tool_calls")
    text = calls[0]["function"]["arguments"] if as_tool else choice["message"]["content"]
    value = json.loads(text)
    if known:
        assert fits(value["a"] if as_tool else value, schema), (schema, text)
    return 200


async def test_random_schemas_are_kept_to(server: RunningServer, engine: Engine) -> None:
    """In a response and in a call; the event loop keeps running meanwhile."""

    @REPEATABLE
    @given(st.randoms(use_true_random=False), st.booleans())
    def ask(rng: random.Random, as_tool: bool) -> None:
        schema = random_schema(rng, 1 if as_tool else 3)
        check(client, schema, 3, as_tool=as_tool, known=True)

    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        await asyncio.to_thread(ask)


async def test_odd_and_boundless_schemas_are_kept_to_or_refused(
    server: RunningServer, engine: Engine
) -> None:
    def ask() -> list[int]:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            return [check(client, each, 1, as_tool=False, known=False) for each in BOUNDLESS]

    assert set(await asyncio.to_thread(ask)) == {200, 400}
