"""Policies before vLLM's server, for arrival, routing and tenants: `--middleware vsched.integrations.vllm.Middleware`.

It sees requests, not the scheduler. A request counts as waiting until its first output, and then as running.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vsched.api.middleware import NAME, NAME_FORM, read_tenant_keys
from vsched.config.policies import HostSettings
from vsched.integrations.vllm.settings import (
    FRONT,
    NAME_CHARACTERS_MAX,
    read_settings,
    statistics_path,
    target_of,
    tenant_of,
)
from vsched.policy import (
    Admit,
    ArrivalDecision,
    ArrivalView,
    ArrivingRequest,
    Hold,
    ReplicaView,
    RoutingView,
    Shed,
)
from vsched.policy.measured import EndTime, FirstTokenTime
from vsched.policy_host import HostMeasured, PolicyHost

logger = logging.getLogger("vllm.vsched")
PATHS = (
    *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions"),
    *("/v1/responses", "/v1/messages", "/invocations"),
)
BODY_BYTES_MAX = 256 << 20
REPLICA_HEADER = "x-data-parallel-rank"
Body = dict[str, Any]
T = TypeVar("T")
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class InFlight:
    """A request that is held, waiting or running."""

    def __init__(self, tenant: str, body: Body) -> None:
        self.arrived_ns, self.tenant = time.monotonic_ns(), tenant
        self.priority = -_decoded(body, "priority", int)  # vLLM: less is more urgent
        self.choices = max(_decoded(body, "n", int), 1)
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        self.outputs_max = next(filter(None, (_decoded(body, name, int) for name in names)), 0)
        self.session = _decoded(body, "session_id", str)[:NAME_CHARACTERS_MAX]
        self.more = _decoded(body, "vllm_xargs", dict[str, Any])
        self.target_ns = target_of(self.more, self.arrived_ns)
        self.state, self.asks, self.replica, self.refused = "held", 0, 0, False


class Middleware:
    """ASGI middleware; reads vLLM's `--additional-config`, with the table `server` of a vsched configuration."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._host: PolicyHost | None = None
        self._tenants: Mapping[str, str] = {}
        self._tenant_header = ""
        self._passed_over_ns = 0
        self._replicas = 1
        self._flying: set[InFlight] = set()
        self._measured = HostMeasured()
        self._routed = 0

    def read_settings(self, vllm_config: Any) -> HostSettings:
        """Return the settings of this server."""
        import vllm

        return read_settings(vllm_config, vllm.__version__, FRONT)

    def _ready(self, app: Any) -> PolicyHost:
        if self._host is None:
            settings = self.read_settings(app.state.vllm_config)
            limits, server = settings.limits, settings.server
            self._passed_over_ns = int(limits.passed_over_max_s * 1e9)
            self._tenant_header = server.tenant_header
            if name := server.tenant_keys_variable:
                self._tenants = read_tenant_keys(os.environ.get(name, ""), path=name)
            self._replicas = app.state.vllm_config.parallel_config.data_parallel_size
            self._host = PolicyHost(
                settings.policies,
                now_ns=time.perf_counter_ns,
                log=logger,
                budget_ms=limits.call_budget_ms,
                slow_max=limits.slow_calls_max,
            )
        return self._host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # as vLLM checks keys
        if path == "/vsched" and scope["method"] == "GET":
            figures = {"arrival": self._ready(scope["app"]).figures()}
            figures["scheduler"] = _scheduler_figures(scope["app"].state.vllm_config)
            await JSONResponse(figures)(scope, receive, send)
        elif scope["method"] == "POST" and path in PATHS:
            await self._serve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = self._ready(scope["app"])
        tenant = self._tenant(Headers(scope=scope))
        if tenant and NAME.fullmatch(tenant) is None:
            await _refusal(400, f"the tenant is no name of {NAME_FORM}")(scope, receive, send)
            return
        data = await _read(receive)
        if data is None:
            await _refusal(413, f"the body has over {BODY_BYTES_MAX:,} bytes")(scope, receive, send)
            return
        try:
            body: Body = _decode(data)
        except msgspec.MsgspecError:
            await self._app(scope, _replayed(data, receive), send)  # the server words the error
            return
        if not self._names_tenants:
            tenant = tenant_of(_decoded(body, "vllm_xargs", dict[str, Any]))
        one = InFlight(tenant, body)
        self._flying.add(one)
        try:
            refusal = await self._admit(host, one, scope["path"], receive)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            scope = {**scope, "headers": [*scope["headers"]]}
            if self._names_tenants or "tenant" in one.more:
                body["vllm_xargs"] = {**one.more, "tenant": one.tenant}
                data = msgspec.json.encode(body)
                MutableHeaders(scope=scope)["content-length"] = str(len(data))
            if self._replicas > 1 and host.seat("routing") is not None:
                one.replica = self._route(host, one)
                MutableHeaders(scope=scope)[REPLICA_HEADER] = str(one.replica)
            one.state = "waiting"
            await self._app(scope, _replayed(data, receive), self._watched(one, send))
        finally:
            self._flying.discard(one)
            host.log_notices()

    async def _admit(
        self, host: PolicyHost, one: InFlight, path: str, receive: Receive
    ) -> Response | None:
        """Ask the arrival policy, and hold; return the refusal, None to admit."""
        seat = host.seat("arrival")
        while seat is not None:
            now_ns, most = time.monotonic_ns(), self._passed_over_ns
            if now_ns >= one.arrived_ns + most:
                return None
            view = self._view(one, now_ns, seat.state)
            decision: ArrivalDecision = seat.decide(view, now_ns, one.arrived_ns, most)
            match decision:
                case Admit():
                    return None
                case Shed(reason, retry_after_s, status):
                    return _refusal(status, reason, retry_after_s)
                case Hold(until_ns):
                    one.asks += 1
                    until_ns = seat.lengthen_hold(until_ns, now_ns)
                    if await _left(receive, (until_ns - time.monotonic_ns()) / 1e9):
                        return Response(status_code=499)
                case _:
                    url = decision.base_url.rstrip("/") + path
                    return RedirectResponse(url, status_code=307)
        return None

    def _view(self, one: InFlight, now_ns: int, state: Any) -> ArrivalView:
        others = [each for each in self._flying if each is not one]
        waiting = [each for each in others if each.state == "waiting"]
        return ArrivalView(
            now_ns=now_ns,
            request=ArrivingRequest(
                tenant=one.tenant,
                session=one.session,
                priority=one.priority,
                arrived_ns=one.arrived_ns,
                target_ns=one.target_ns,
                choices=one.choices,
                outputs_max=one.outputs_max,
                asks=one.asks,
            ),
            held=sum(each.state == "held" for each in others),
            waiting=len(waiting),
            as_urgent=sum(
                each.state != "running" and each.priority >= one.priority for each in others
            ),
            running=sum(each.state == "running" for each in others),
            tenant_requests=sum(each.tenant == one.tenant for each in others),
            hold_max_ns=self._passed_over_ns,
            measured=self._measured,
            state=state,
        )

    def _route(self, host: PolicyHost, one: InFlight) -> int:
        seat, count = host.seat("routing"), self._replicas
        assert seat is not None
        loads = [0] * count
        for each in self._flying:
            if each.state != "held":
                loads[each.replica] += each.outputs_max or 1
        self._routed += 1
        view = RoutingView(
            now_ns=time.monotonic_ns(),
            replicas=[
                ReplicaView(index=i, load_tokens=n, healthy=True) for i, n in enumerate(loads)
            ],
            prompt_tokens=0,
            item_keys=(),
            routed=self._routed - 1,
            max_tokens=one.outputs_max,
            priority=one.priority,
            tenant=one.tenant,
            session=one.session,
            measured=self._measured,
            state=seat.state,
        )
        return int(seat.decide(view, count, range(count), loads))

    def _watched(self, one: InFlight, send: Send) -> Send:

        async def watched(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                one.refused = message["status"] >= 400  # an error is no output
            if message["type"] != "http.response.body" or one.refused:
                return
            now_ns = time.monotonic_ns()
            if message.get("body") and one.state == "waiting":
                one.state = "running"
                took_ns = now_ns - one.arrived_ns
                first = FirstTokenTime(
                    now_ns, took_ns, 0, 0, 0, 0, 0, one.priority, one.tenant, one.target_ns
                )
                self._measured.note_first_token(first)
            # A stream ends with an empty body.
            if one.state == "running" and not message.get("more_body"):
                self._measured.note_end(
                    EndTime(now_ns, now_ns - one.arrived_ns, 0, 0, 0, one.tenant)
                )

        return watched

    @property
    def _names_tenants(self) -> bool:
        """Whether a header or a key says which tenant sends a request, and not its body."""
        return bool(self._tenant_header or self._tenants)

    def _tenant(self, headers: Headers) -> str:
        if self._tenant_header:
            return headers.get(self._tenant_header, "").strip()
        key = headers.get("authorization", "").removeprefix("Bearer ").encode()
        same = [
            name for name, one in self._tenants.items() if hmac.compare_digest(key, one.encode())
        ]
        return same[0] if same else ""


def _scheduler_figures(vllm_config: Any) -> Any:
    """Return the figures of the scheduler, another process, if it writes them."""
    try:
        return msgspec.json.decode(statistics_path(vllm_config).read_bytes())
    except OSError:
        return None


def _decoded(body: Body, key: str, kind: type[T]) -> T:
    """Return a field of the body; the empty value if it is missing or of another type."""
    try:
        return msgspec.json.decode(body[key], type=kind) if key in body else kind()
    except msgspec.MsgspecError:
        return kind()


async def _read(receive: Receive) -> bytes | None:
    """Read a body; None if it is too large."""
    data = bytearray()
    while True:
        message = await receive()
        data += message.get("body", b"")
        if len(data) > BODY_BYTES_MAX:
            return None
        if message["type"] != "http.request" or not message.get("more_body"):
            return bytes(data)


def _replayed(data: bytes, receive: Receive) -> Receive:
    rest = [{"type": "http.request", "body": data, "more_body": False}]

    async def replayed() -> Message:
        return rest.pop() if rest else await receive()

    return replayed


async def _left(receive: Receive, seconds: float) -> bool:
    """Wait; return True as soon as the client has left."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            while (await receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        return False
    return True


def _refusal(status: int, reason: str, retry_after_s: int = 0) -> Response:
    kind = "invalid_request_error" if status < 429 else "server_overloaded"
    error = {"message": reason, "type": kind, "code": status}
    headers = {"retry-after": str(math.ceil(retry_after_s))} if retry_after_s else None
    return JSONResponse({"error": error}, status, headers)
