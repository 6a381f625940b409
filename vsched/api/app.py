"""The application: routes, access checks, and errors 404 and 405."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from vsched.aio.live import LiveState
from vsched.api.bodies import RequestBodies
from vsched.api.compat.messages import MessagesEndpoint, MessagesRequest
from vsched.api.compat.responses import ResponsesEndpoint
from vsched.api.completions import ChatEndpoint, CompletionEndpoint, Serving
from vsched.api.contract import ApiSettings, EngineContract, ServingContract
from vsched.api.http_exchange import (
    MessagesError,
    MessagesForm,
    WireForm,
    form_of,
    is_anthropic_client,
)
from vsched.api.metrics import ApiMetrics
from vsched.api.middleware import CheckAccess, request_middleware, response_id
from vsched.api.openapi import ApiRoute, Documentation, get, post
from vsched.api.operations import ClientOperations, OperatorOperations
from vsched.api.page import page_routes
from vsched.api.response_schema import State
from vsched.api.resuming import KeptResponseRoute, Resumption
from vsched.api.unsupported import not_served
from vsched.errors import RequestFailed, RequestRefused, limit_message

if TYPE_CHECKING:
    from vsched.api.tracing.spans import Tracing

_VALUE_CHARACTERS_MAX = 100


def create_app(
    engine: EngineContract,
    settings: ApiSettings,
    metrics: ApiMetrics | None = None,
    *,
    resumption: Resumption | None = None,
    tracing: Tracing | None = None,
) -> Starlette:
    """Build the HTTP application for an engine.

    The engine may still be loading: `/health` reports it, and completions are refused until it is ready. Requests are
    counted in `metrics`, by default a new instance. `resumption` serves answers of an earlier engine by their ids.
    `tracing` gets the spans of requests.
    """
    metrics = metrics or engine_metrics(engine, settings)
    resumption = resumption or Resumption()
    bodies = RequestBodies(settings, keeps=resumption.journal is not None)
    operators = _operator_routes(engine, metrics, bodies)
    serving = Serving(engine, settings, metrics, bodies, resumption.journal, tracing)
    return _with_clients(serving, resumption, operators)


def engine_metrics(engine: EngineContract, settings: ApiSettings) -> ApiMetrics:
    """Create the metrics of an engine and of its clients' requests."""
    return ApiMetrics(engine, tenants_max=settings.tenants_max, vllm_names=settings.vllm_metrics)


def create_frontend(
    engine: ServingContract,
    settings: ApiSettings,
    metrics: ApiMetrics,
    operations: ASGIApp,
    tracing: Tracing | None = None,
) -> Starlette:
    """Build the application of an API process, which has no engine: `operations` serves the operator routes."""
    bodies = RequestBodies(settings)
    # Only the paths and methods of these routes are used; their endpoints are never called.
    routes = _operator_routes(cast("EngineContract", engine), metrics, bodies)
    for route in routes:
        route.app = operations
    serving = Serving(engine, settings, metrics, bodies, tracing=tracing)
    return _with_clients(serving, Resumption(), routes)


def create_operations(
    engine: EngineContract, settings: ApiSettings, metrics: ApiMetrics
) -> Starlette:
    """Build the operator routes that `create_frontend` forwards; access was checked there."""
    return _application(_operator_routes(engine, metrics, RequestBodies(settings)), None)


def _with_clients(
    serving: Serving, resumption: Resumption, operator_routes: list[ApiRoute]
) -> Starlette:
    """Build the application of these routes for operators, and the routes for clients."""
    documentation = Documentation()
    messages = MessagesEndpoint(serving)
    operations = ClientOperations(serving.engine, serving.bodies)
    endpoints = [
        ChatEndpoint(serving),
        CompletionEndpoint(serving),
        ResponsesEndpoint(serving),
        messages,
    ]
    resumption.serve({endpoint.path: endpoint for endpoint in endpoints})
    counting: dict[str, Any] = {"request": MessagesRequest, "error": MessagesError}
    client_routes = [
        *(post(endpoint.path, endpoint) for endpoint in endpoints),
        post("/v1/messages/count_tokens", messages.count_tokens, **counting),
        *(KeptResponseRoute(endpoint, resumption) for endpoint in endpoints),
        get("/v1/models", operations.models),
        get("/v1/models/{model:path}", operations.model),
        post("/tokenize", operations.tokenize),
        post("/detokenize", operations.detokenize),
        get("/health", operations.health, response=State),
        get("/ready", operations.health, response=State),
        get("/ping", operations.health, response=State),
        post("/ping", operations.health, response=State),
        get("/version", operations.version),
        get("/openapi.json", documentation.openapi),
    ]
    documentation.routes = [*client_routes, *operator_routes]
    return _application([*documentation.routes, *page_routes()], serving.settings)


def _operator_routes(
    engine: EngineContract, metrics: ApiMetrics, bodies: RequestBodies
) -> list[ApiRoute]:
    """Routes for operators, which need the engine."""
    operations = OperatorOperations(engine, metrics, bodies)
    return [
        get("/load", operations.load),
        get("/metrics", operations.metrics, media_type="text/plain"),
        get("/admin/statistics", operations.statistics),
        get("/admin/live", operations.live, response=LiveState, event=LiveState),
        post("/admin/clear", operations.clear),
        get("/admin/replicas", operations.replicas),
        post("/admin/replicas", operations.change_replica),
        get("/admin/policies", operations.policies),
        post("/admin/policies", operations.replace_policies),
        get("/admin/adapters", operations.adapters),
        post("/admin/adapters", operations.load_adapter),
        ApiRoute("DELETE", "/admin/adapters/{name:path}", operations.unload_adapter),
        post("/v1/load_lora_adapter", operations.load_lora_adapter),
        post("/v1/unload_lora_adapter", operations.unload_lora_adapter),
    ]


def _application(routes: list[ApiRoute], settings: ApiSettings | None) -> Starlette:
    """Build the application; without settings, access was checked by another process.

    Access checks wrap each route, after routing: a request with an unknown path or method gets a 404 or 405, not a
    misleading 401 or 415.
    """
    middleware: list[Middleware] = []
    if settings is not None:
        middleware = request_middleware(settings)
        for route in routes:
            route.app = CheckAccess(route.app, settings)
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _no_route, Exception: _internal_error},
    )
    app.router.redirect_slashes = False
    return app


def _error_response(form: WireForm, error: RequestRefused | RequestFailed) -> Response:
    body = msgspec.json.encode(form.error(error))
    return Response(body, status_code=error.status, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method, headers = request.url.path, request.method, {}
    if error.status_code == 405:
        taking = [one for one in request.app.routes if one.matches(request.scope)[0] != Match.NONE]
        methods = ", ".join(sorted({name for route in taking for name in route.methods}))
        message = limit_message(
            "the method is not allowed for this path",
            value=method[:_VALUE_CHARACTERS_MAX],
            limit=methods,
            remedy="use one of these",
        )
        refused = RequestRefused(message, code="method_not_allowed", status=405)
        headers["allow"] = methods
    else:
        refused = RequestRefused(_not_found(path, method), code="not_found", status=404)
    if "transfer-encoding" in request.headers or "content-length" in request.headers:
        headers["connection"] = "close"  # the body is not read
    form = MessagesForm() if is_anthropic_client(request.headers.raw) else form_of(request.scope)
    response = _error_response(form, refused)
    response.headers.update(headers)
    return response


def _not_found(path: str, method: str) -> str:
    known = not_served(path, method)
    if known is not None:
        return known
    shown = path[:_VALUE_CHARACTERS_MAX]
    if "//" in path:
        single = re.sub("/+", "/", shown)
        return f"there is nothing at {shown}. Remedy: leave out the double slash: {single}."
    return f"there is nothing at {shown}. Remedy: check the URL; completions live under /v1."


async def _internal_error(request: Request, error: Exception) -> Response:
    del error
    failed = RequestFailed("the server made a mistake")
    response = _error_response(form_of(request.scope), failed)
    # This handler runs outside all middleware, so the response is tagged here.
    response.headers["x-request-id"] = response_id(request.scope).decode()
    return response
