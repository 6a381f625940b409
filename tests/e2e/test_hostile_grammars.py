"""Schemas and grammars that crash the grammar library: a 400 on every endpoint, without effect on other requests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.asking import TEXTS, Ask, begin, read
from tests.fuzz.documents import CHAT, at_doors, body_at
from tests.patience import PATIENCE_S
from vsched import Config, Engine, SamplingParams
from vsched.aio.grammar_checks import GrammarProcesses
from vsched.api.server import RunningServer, running_server

pytestmark = pytest.mark.asyncio(loop_scope="package")

MODEL = "nano25"


def linked(keyword: str, count: int) -> dict[str, Any]:
    """Return a schema of `count` references, each within this keyword of the one before."""
    inner: list[dict[str, Any]] = [{keyword: [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(count)]
    if keyword == "items":
        inner = [{keyword: {"$ref": f"#/$defs/d{n + 1}"}} for n in range(count)]
    defs = {f"d{n}": one for n, one in enumerate(inner)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {"type": "null"}}}


SCHEMAS: dict[str, Any] = {
    "const": {"const": -(2**63)},
    "multiples": {"allOf": [{"multipleOf": 49999}, {"multipleOf": 49998}]},
    **{one: linked(one, 1000) for one in ("prefixItems", "items", "oneOf", "anyOf", "allOf")},
}
CHAIN = "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(3000)) + '\nr3000: "a"\n'
GRAMMARS = {
    "chained rules": CHAIN,
    "chained rules in GBNF": CHAIN.replace("start:", "root:").replace(":", " ::="),
    "schema in Lark": f"start: %json {json.dumps(SCHEMAS['const'])}",
    "brackets": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
}


async def refused(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
    """Send a request, and check that the response is a 400 with a remedy, or 200."""
    body = body_at(path, fields, model=MODEL, tokens=4)
    reply = await client.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert reply.status_code in {200, 400, 413}, (path, reply.text)
    if reply.status_code != 200:
        assert "Remedy" in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("name", SCHEMAS)
async def test_schemas_that_crash_the_library_end_nothing(
    server: RunningServer, engine: Engine, name: str
) -> None:
    ranks = engine.rank_pids
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        await asyncio.gather(
            *(refused(client, path, fields) for path, fields in at_doors(SCHEMAS[name]).values())
        )
    assert engine.state == "ready"
    assert engine.rank_pids == ranks


@pytest.mark.parametrize("name", GRAMMARS)
async def test_grammars_that_crash_the_library_end_nothing(
    server: RunningServer, engine: Engine, name: str
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        for field in ("guided_grammar", "structured_outputs"):
            value = GRAMMARS[name] if field == "guided_grammar" else {"grammar": GRAMMARS[name]}
            await refused(client, CHAT, {field: value})
    assert engine.state == "ready"


def checker_of(engine: Engine) -> GrammarProcesses:
    assert engine._running is not None
    checker = engine._running.grammars._checker
    assert isinstance(checker, GrammarProcesses)
    return checker


async def test_killed_grammar_server_loses_no_request(engine: Engine) -> None:
    """32 requests are in flight, some of them with a grammar, and some with one that crashes."""
    held = SamplingParams(max_tokens=40, seed=5, grammar=json.dumps({"regex": "[ab]{30}"}))
    free = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    checker = checker_of(engine)
    started = [await begin(engine, Ask(TEXTS[n % 2]), held if n % 2 else free) for n in range(12)]
    reading = [asyncio.create_task(read(one)) for one in started]

    async def ask(number: int) -> str:
        grammar = json.dumps({"regex": f"[a-{chr(98 + number)}]{{8}}"})
        requested = SamplingParams(max_tokens=40, seed=number, grammar=grammar)
        return (await read(await begin(engine, Ask(TEXTS[0]), requested))).text

    asking = [asyncio.create_task(ask(number)) for number in range(20)]
    assert checker.pid
    os.kill(checker.pid, signal.SIGKILL)
    texts = await asyncio.gather(*asking)
    found = await asyncio.gather(*reading)
    assert [len(text) for text in texts] == [8] * 20
    assert all(len(each.text) == 30 for each in found[1::2])
    assert all(len(each.token_ids) == 24 for each in found[::2])


@pytest.mark.slow
async def test_api_processes_check_grammars_as_the_engine_does(
    configure: Callable[..., Config],
) -> None:
    async with (
        running_server(configure("nano25", "server.processes=2")) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        for path, fields in at_doors({"const": -(2**63)}).values():
            await refused(client, path, fields)
        reply = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "1", "guided_regex": "ab"}
        )
        assert reply.json()["choices"][0]["text"] == "ab"
