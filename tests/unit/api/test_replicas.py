"""`/admin/replicas`: state of groups, and operations on one of them."""

from __future__ import annotations

from tests.each_case import each_case
from tests.unit.api.fakes import Client, FakeEngine, post
from vsched.api import ApiSettings, create_app
from vsched.errors import RequestRefused

PATH = "/admin/replicas"


async def test_replicas_lists_the_groups() -> None:
    engine = FakeEngine()
    engine.state = "degraded"
    reply = await Client(create_app(engine, ApiSettings())).send("GET", PATH)
    assert reply.json == {"state": "degraded", "groups": engine.rows}


@each_case("action", ["drain", "restart", "resume"])
async def test_replicas_action_is_done_and_reported(action: str) -> None:
    """A drain that takes too long gets a response, too."""
    engine = FakeEngine()
    reply = await post(engine, PATH, {"group": "generate-1", "action": action})
    assert engine.actions == [(action, "generate-1")]
    expected = {"group": "generate-1", "action": action, "done": True, "state": "draining"}
    assert (reply.status, reply.json) == (200, expected)
    engine.in_time = False
    late = await post(engine, PATH, {"group": "generate-1", "action": action})
    assert (late.status, late.json["done"]) == (200, action == "resume")


async def test_replicas_passes_refusals_on_and_names_the_known_actions() -> None:
    engine = FakeEngine()
    engine.refusal = RequestRefused("it is down. Remedy: wait.", code="wrong_state", status=409)
    reply = await post(engine, PATH, {"group": "generate-1", "action": "restart"})
    assert (reply.status, reply.error["code"]) == (409, "wrong_state")
    reply = await post(FakeEngine(), PATH, {"group": "generate-1", "action": "stop"})
    assert (reply.status, reply.error["code"]) == (400, "unknown_action")
    assert "name one of drain, restart, resume." in reply.error["message"]


@each_case("body", [b"{", {}, {"group": "generate-1"}, {"group": 1, "action": "drain"}])
async def test_replicas_refuses_invalid_requests(body: object) -> None:
    assert (await post(FakeEngine(), PATH, body)).status == 400
