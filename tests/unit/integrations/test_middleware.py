"""Policies before another server: tenants, refusals, holds, routing; driven through ASGI."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from tests.unit.kernel.setups import ByTenant
from vsched.config import ServerConfig
from vsched.config.policies import HostSettings
from vsched.integrations.vllm.middleware import Middleware
from vsched.integrations.vllm.settings import statistics_path, write_file
from vsched.policy import (
    Admit,
    ArrivalDecision,
    ArrivalView,
    Policy,
    RequestPolicy,
    RoutingPolicy,
    RoutingView,
)
from vsched.policy_host import SeatPolicies
from vsched.sim.network.asgi_client import AsgiClient, Response

CHAT = "/v1/chat/completions"


class LastReplica(RoutingPolicy, frozen=True, kw_only=True):
    def choose(self, view: RoutingView) -> int:
        return len(view.replicas) - 1


class Server:
    """The server behind: keeps the requests that reach it, and sends two pieces."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        self.bodies.append(json.loads(message["body"]) if message["body"] else {})
        self.headers.append({key.decode(): value.decode() for key, value in scope["headers"]})
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two", "more_body": False})


class Door(Middleware):
    """The middleware with given policies and keys of the table `server`."""

    def __init__(self, app: Any, by_table: Mapping[str, Policy], **server: Any) -> None:
        super().__init__(app)
        policies = SeatPolicies(by_table=by_table)
        self.settings = HostSettings(policies=policies, server=ServerConfig(**server))

    def read_settings(self, vllm_config: Any) -> HostSettings:
        return self.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = SimpleNamespace(state=SimpleNamespace(vllm_config=VLLM))
        await super().__call__({**scope, "app": app, "root_path": "/llm"}, receive, send)


PARALLEL = SimpleNamespace(data_parallel_size=3, data_parallel_rank=0)
VLLM = SimpleNamespace(parallel_config=PARALLEL, instance_id="test-middleware")


async def call(
    door: Door, body: Any = None, headers: Mapping[str, str] | None = None, path: str = CHAT
) -> Response:
    """Send one request, its body in two pieces."""
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield data[:5]
        yield data[5:]

    method, lines = "GET" if path == "/vsched" else "POST", (headers or {}).items()
    async with AsgiClient(door).open(method, path, pieces=pieces(), headers=lines) as sent:
        return await sent.response()


@pytest.mark.parametrize("path", [CHAT, f"/llm{CHAT}", "/invocations"])
async def test_tenant_of_the_gateway_replaces_that_of_the_client(path: str) -> None:
    server = Server()
    door = Door(server, {"arrival": ByTenant()}, tenant_header="X-Tenant")
    body = {"n": 1, "vllm_xargs": {"tenant": "liar", "ttft_target_ms": 5}, "text": "é"}
    reply = await call(door, body, {"x-tenant": "a", "content-length": "1"}, path)
    assert (reply.status, reply.body) == (200, b"onetwo")
    assert server.bodies == [{**body, "vllm_xargs": {"tenant": "a", "ttft_target_ms": 5}}]
    assert server.headers[0]["content-length"] != "1"


async def test_key_names_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "a=one,b=two")
    server = Server()
    door = Door(server, {}, tenant_keys_variable="KEYS")
    for key in ("two", "three"):
        liar = {"vllm_xargs": {"tenant": "a"}}
        await call(door, liar, {"authorization": f"Bearer {key}"})
    assert [one["vllm_xargs"]["tenant"] for one in server.bodies] == ["b", ""]


@pytest.mark.parametrize(
    ("tenant", "status", "header"),
    [
        ("shed", 503, ("retry-after", "7")),
        ("elsewhere", 307, ("location", f"http://other:8000{CHAT}")),
    ],
)
async def test_refused_requests_do_not_reach_the_server(
    tenant: str, status: int, header: tuple[str, str]
) -> None:
    server = Server()
    door = Door(server, {"arrival": ByTenant()}, tenant_header="x-tenant")
    reply = await call(door, {}, {"x-tenant": tenant})
    assert (reply.status, reply.headers[header[0]]) == (status, header[1])
    assert server.bodies == []


@pytest.mark.parametrize("tenant", ["held", "broken", "plain"])
async def test_held_and_failing_decisions_end_in_admission(tenant: str) -> None:
    server = Server()
    door = Door(server, {"arrival": ByTenant()}, tenant_header="x-tenant")
    assert (await call(door, {}, {"x-tenant": tenant})).status == 200
    path = statistics_path(VLLM)
    write_file(path, b'{"waiting":3}')
    figures = (await call(door, path="/vsched")).json()
    path.unlink()
    assert figures["scheduler"] == {"waiting": 3}
    assert figures["arrival"]["policy_faults"] == ({"ByTenant": 1} if tenant == "broken" else {})
    calls = figures["arrival"]["policy_calls"]["arrival"]["calls"]
    assert calls == (2 if tenant == "held" else 1)


async def test_without_the_header_a_client_names_no_tenant() -> None:
    server, arrival = Server(), SeesAll()
    door = Door(server, {"arrival": arrival}, tenant_header="x-tenant")
    await call(door, {"vllm_xargs": {"tenant": "a"}})
    assert arrival.seen[0].request.tenant == ""
    assert server.bodies == [{"vllm_xargs": {"tenant": ""}}]


@pytest.mark.parametrize("limit", ["max_completion_tokens", "max_tokens", "max_output_tokens"])
async def test_view_has_the_output_limit_and_cut_names_of_the_body(limit: str) -> None:
    """Policies keep names in a state of limited size."""
    arrival = SeesAll()
    body = {"vllm_xargs": {"tenant": "x" * 20_000}, "session_id": "s" * 20_000, limit: 7}
    await call(Door(Server(), {"arrival": arrival}), body)
    seen = arrival.seen[0].request
    assert (seen.tenant, seen.session, seen.outputs_max) == ("x" * 64, "s" * 64, 7)


async def test_routing_policy_names_the_replica() -> None:
    server = Server()
    door = Door(server, {"routing": LastReplica()})
    await call(door, {})
    assert server.headers[0]["x-data-parallel-rank"] == "2"


async def test_broken_bodies_and_names_are_answered() -> None:
    server = Server()
    door = Door(server, {}, tenant_header="x-tenant")
    reply = await call(door, {}, {"x-tenant": "no name!"})
    assert reply.status == 400
    assert b"64 letters" in reply.body
    with pytest.raises(json.JSONDecodeError):
        await call(door, b"{no json")  # the server gets it as it is


class SeesAll(RequestPolicy, frozen=True, kw_only=True):
    seen: list[ArrivalView] = msgspec.field(default_factory=list)

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        self.seen.append(view)
        return Admit()


class SeesReplicas(RoutingPolicy, frozen=True, kw_only=True):
    seen: list[RoutingView] = msgspec.field(default_factory=list)

    def choose(self, view: RoutingView) -> int:
        self.seen.append(view)
        return 0


class Streaming(Server):
    """Ends its answer with an empty piece, as streams do."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def in_pieces(message: Message) -> None:
            await send({**message, "more_body": True} if "body" in message else message)

        await super().__call__(scope, receive, in_pieces)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.mark.parametrize("server", [Server, Streaming])
async def test_views_have_the_facts_of_the_request_and_of_those_before(
    server: type[Server],
) -> None:
    arrival, routing = SeesAll(), SeesReplicas()
    door = Door(server(), {"arrival": arrival, "routing": routing}, tenant_header="x-tenant")
    for _ in range(2):
        await call(door, {"session_id": "talk", "priority": -3}, {"x-tenant": "a"})
    _, second = arrival.seen
    assert len(second.measured.ends) == 2  # computed on access
    assert [one.tenant for one in second.measured.first_tokens] == ["a", "a"]
    for one in (second.request, routing.seen[1]):
        assert (one.tenant, one.session, one.priority) == ("a", "talk", 3)
    assert second.now_ns <= routing.seen[1].now_ns


async def test_errors_of_the_server_are_no_first_tokens() -> None:
    """Else a few broken requests make an overloaded server look fast."""
    arrival = SeesAll()
    door = Door(Server(status=400), {"arrival": arrival})
    for _ in range(2):
        assert (await call(door)).status == 400
    assert not arrival.seen[1].measured.first_tokens
    assert not arrival.seen[1].measured.ends
