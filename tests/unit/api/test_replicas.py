"""`/admin/replicas`: state of groups, and operations on one of them."""

from __future__ import annotations

from tests.each_case import each_case
from tests.unit.api.fakes import Client, FakeEngine, Reply
from vsched.api import ApiSettings, create_app
from vsched.errors import RequestRefused

PATH = "/admin/replicas"


async def post(engine: FakeEngine, body: object) -> Reply:
    return await Client(create_app(engine, ApiSettings())).send("POST", PATH, body)


async def test_replicas_lists_the_groups() -> None:
    engine = FakeEngine()
    engine.state = "degraded"
    reply = await Client(create_app(engine, ApiSettings())).send("GET", PATH)
    assert reply.json == {"state": "degraded", "groups": engine.rows}


@each_case("action", ["drain", "restart", "resume"])
async def test_replicas_action_is_done_and_reported(action: str) -> None:
    engine = FakeEngine()
    reply = await post(engine, {"group": "generate-1", "action": action})
    assert engine.actions == [(action, "generate-1")]
    expected = {"group": "generate-1", "action": action, "done": True, "state": "draining"}
    assert (reply.status, reply.json) == (200, expected)


async def test_replicas_reports_when_the_deadline_passed_before() -> None:
    """A drain that takes too long still gets a response."""
    engine = FakeEngine()
    engine.in_time = False
    reply = await post(engine, {"group": "generate-1", "action": "drain"})
    assert (reply.status, reply.json["done"]) == (200, False)


async def test_replicas_refuses_an_unknown_action_and_names_the_known_ones() -> None:
    reply = await post(FakeEngine(), {"group": "generate-1", "action": "stop"})
    assert (reply.status, reply.error["code"]) == (400, "unknown_action")
    assert "name one of drain, restart, resume." in reply.error["message"]


async def test_replicas_passes_a_refusal_on() -> None:
    """With the engine's status."""
    engine = FakeEngine()
    engine.refusal = RequestRefused("it is down. Remedy: wait.", code="wrong_state", status=409)
    reply = await post(engine, {"group": "generate-1", "action": "restart"})
    assert (reply.status, reply.error["code"]) == (409, "wrong_state")


@each_case("body", [b"{", {}, {"group": "generate-1"}, {"group": 1, "action": "drain"}])
async def test_replicas_refuses_invalid_requests(body: object) -> None:
    reply = await post(FakeEngine(), body)
    assert reply.status == 400
