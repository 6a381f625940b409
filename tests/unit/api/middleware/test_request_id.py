from __future__ import annotations

import re
from typing import Any

import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, PLAIN, Client, FakeEngine, Reply, chat
from vsched.api import ApiSettings, create_app
from vsched.api.openapi import JsonEndpoint
from vsched.errors import RequestRefused

BODIES: dict[str, Any] = {
    CHAT: chat(),
    f"{CHAT} stream": chat(stream=True),
    PLAIN: {"prompt": "x"},
    f"{PLAIN} stream": {"prompt": "x", "stream": True},
    f"{CHAT} unknown": chat(nonsense=1),
    f"{CHAT} text": b"no JSON",
    "/tokenize": {"prompt": "x"},
    "/admin/replicas": {"group": "x", "action": "dance"},
    "/nowhere": {},
}


async def ask(
    name: str, sent: str | None, engine: FakeEngine | None = None, **settings: Any
) -> Reply:
    headers = {} if sent is None else {"x-request-id": sent}
    app = create_app(engine or FakeEngine(), ApiSettings(**settings))
    return await Client(app).send("POST", name.partition(" ")[0], BODIES[name], headers=headers)


@each_case("name", BODIES)
async def test_request_id_comes_back_on_every_kind_of_response(name: str) -> None:
    reply = await ask(name, "trace-1.2:3/a+b=")
    assert reply.headers["x-request-id"] == "trace-1.2:3/a+b="


@each_case("name", BODIES)
async def test_request_id_is_made_if_none_was_sent(name: str) -> None:
    first, second = await ask(name, None), await ask(name, None)
    ids = {first.headers["x-request-id"], second.headers["x-request-id"]}
    assert len(ids) == 2
    assert all(re.fullmatch(r"[\w-]{24,}", one) for one in ids)


@each_case("sent", ["", "a b", "x" * 129, "é", 'a"b', "a\tb"])
async def test_request_id_that_cannot_be_sent_back_is_replaced(sent: str) -> None:
    reply = await ask(CHAT, sent)
    assert reply.status == 200
    assert reply.headers["x-request-id"] == reply.json["id"]
    assert reply.json["id"].startswith("chatcmpl-")


async def test_request_id_of_a_client_is_a_part_of_the_engines() -> None:
    """Two requests may send the same id; statistics and records still contain it."""
    engine = FakeEngine()
    replies = [await ask(CHAT, "mine", engine) for _ in range(2)]
    ids = [generation.request_id for generation in engine.generations]
    assert ids == [reply.json["id"] for reply in replies]
    assert len(set(ids)) == 2
    assert all(one.startswith("chatcmpl-mine-") for one in ids)


async def test_request_id_is_on_refusals_of_keys_hosts_and_engines() -> None:
    engine = FakeEngine()
    engine.refusal = RequestRefused("full", code="queue_full", status=429, retry_after_s=1)
    replies = [
        await ask(CHAT, "mine", api_key="secret"),
        await ask(CHAT, "mine", engine),
        await ask(f"{CHAT} stream", "mine", engine),
    ]
    assert [reply.status for reply in replies] == [401, 429, 429]
    assert {reply.headers["x-request-id"] for reply in replies} == {"mine"}


async def test_request_id_is_on_what_no_endpoint_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(JsonEndpoint, "__call__", broken)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/admin/statistics",
        "headers": [(b"x-request-id", b"mine")],
        "client": ("127.0.0.1", 1),
    }
    with pytest.raises(ValueError, match="broken"):
        await create_app(FakeEngine(), ApiSettings())(scope, receive, send)
    assert sent[0]["status"] == 500
    assert dict(sent[0]["headers"])[b"x-request-id"] == b"mine"
