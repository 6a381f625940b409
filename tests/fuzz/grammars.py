"""Sends hostile schemas and grammars to a server with real ranks, and checks every response."""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.fuzz.documents import Asked, draw_asked
from tests.patience import PATIENCE_S
from vsched.api.server import running_server
from vsched.config import load_config

MODEL = "tiny25"
SETTINGS = (
    f"model.name={MODEL}",
    "server.port=0",
    "generate.context_tokens=4096",
    'generate.memory={use="pinned", tokens=8192}',
)
TOGETHER = 8
JSON = {"content-type": "application/json"}
PLAIN = {"prompt": "1", "max_tokens": 40, "ignore_eos": True, "temperature": 0.0}


async def fuzz_grammars(url: str, model: str, *, seed: int, count: int) -> Counter[str]:
    """Send documents concurrently, mixed with plain requests; count the statuses of each kind, and dead processes.

    Document `n` depends only on `seed + n`, so that a failed one can be repeated alone.

    Raises:
        AssertionError: When a response is not as expected; has the seed and the document.
    """
    counted: Counter[str] = Counter()
    numbers = iter(range(seed, seed + count))
    done = asyncio.Event()

    async def documents(client: httpx.AsyncClient) -> None:
        for number in numbers:
            requested = draw_asked(random.Random(number), model)
            try:
                reply = await client.post(requested.path, content=requested.body, headers=JSON)
            except httpx.HTTPError as error:
                raise AssertionError(
                    f"{_named(number, requested)} got no answer: {error!r}"
                ) from error
            check(number, requested, reply)
            counted[f"{requested.document.kind}: {reply.status_code}"] += 1
            if killed := re.search(r"died \(SIG[A-Z]+|more than [0-9.]+ s of CPU", reply.text):
                counted[f"process {killed[0].replace('(', 'by ')}"] += 1

    async def plain(client: httpx.AsyncClient) -> None:
        while not done.is_set():
            reply = await client.post("/v1/completions", json={**PLAIN, "model": model})
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["completion_tokens"] == PLAIN["max_tokens"]
            counted["plain: 200"] += 1

    async def hostile(client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(TOGETHER):
                clients.create_task(documents(client))
        done.set()

    async with (
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(plain(client))
        group.create_task(hostile(client))
    return counted


def fuzz_ranks(seed: int, count: int) -> Counter[str]:
    """The same with a server of its own; count the responses.

    Raises:
        AssertionError: Also when a rank has died.
    """
    return asyncio.run(_fuzz_ranks(seed, count))


async def _fuzz_ranks(seed: int, count: int) -> Counter[str]:
    from vsched_workers.checkpoint.random_init import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, MODEL))
        make_checkpoint(path, MODEL, dtype="bfloat16")
        sets = [f"model.path={path}", *SETTINGS]
        async with running_server(load_config(None, sets=sets, environ={}).config) as server:
            ranks = server.engine.rank_pids
            counted = await fuzz_grammars(server.url, MODEL, seed=seed, count=count)
            assert (server.engine.state, server.engine.rank_pids) == ("ready", ranks)
    return counted


def check(number: int, requested: Asked, reply: httpx.Response) -> None:
    """Check one response: 200, with JSON if a schema was sent, or an error with a remedy."""
    reported = (
        f"{_named(number, requested)} was answered by {reply.status_code}: {reply.text[:500]}"
    )
    if reply.status_code != 200:
        busy = reply.status_code == 503 and "retry-after" in reply.headers
        assert reply.status_code in {400, 413} or busy, reported
        assert "Remedy" in reply.json()["error"]["message"], reported
    elif requested.answers_json and (text := _whole(reply.json())) is not None:
        try:
            json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise AssertionError(f"{reported}: {error}") from error


def _named(number: int, requested: Asked) -> str:
    return f"document {number} ({requested.document.kind} by {requested.door}): {requested.body[:4000]!r}"


def _whole(reply: dict[str, Any]) -> str | None:
    """Return the JSON of output that ended by itself; None if it was cut."""
    match reply:
        case {"choices": [{"finish_reason": "stop", "text": str(text)}]}:
            return text
        case {"choices": [{"finish_reason": "stop", "message": {"content": str(text)}}]}:
            return text
        case {"choices": [{"finish_reason": "tool_calls", "message": {"tool_calls": [call, *_]}}]}:
            return str(call["function"]["arguments"])
        case {
            "status": "completed",
            "output": [*_, {"type": "function_call", "arguments": str(text)}],
        }:
            return text
        case {
            "status": "completed",
            "output": [*_, {"type": "message", "content": [{"text": str(text)}]}],
        }:
            return text
        case {"stop_reason": "end_turn", "content": [{"type": "text", "text": str(text)}]}:
            return text
    return None
