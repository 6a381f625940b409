"""The application: routes, access checks, and errors 404 and 405."""

from __future__ import annotations

import re
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp

from vsched.api import openapi
from vsched.api.bodies.reading import RequestBodies
from vsched.api.compat.messages import CountTokensEndpoint, MessagesEndpoint
from vsched.api.compat.responses import ResponsesEndpoint
from vsched.api.completions import ChatEndpoint, CompletionEndpoint
from vsched.api.contract import ApiSettings, EngineContract, ServingContract
from vsched.api.http_exchange import MessagesForm, form_of, is_anthropic_client
from vsched.api.metrics import ApiMetrics
from vsched.api.middleware.access import access_middleware
from vsched.api.middleware.response_tags import response_id
from vsched.api.operations import (
    AdapterEndpoints,
    Descriptions,
    DetokenizeEndpoint,
    Endpoint,
    Operations,
    PoliciesEndpoint,
    ReplicasEndpoint,
    TokenizeEndpoint,
    json_response,
)
from vsched.api.resuming.resumption import KeptAnswerEndpoint, KeptAnswerRoute, Resumption
from vsched.api.unsupported import not_served
from vsched.errors import RequestFailed, RequestRefused, limit_message

_VALUE_CHARACTERS_MAX = 100


def create_app(
    engine: EngineContract,
    settings: ApiSettings,
    metrics: ApiMetrics | None = None,
    *,
    resumption: Resumption | None = None,
) -> Starlette:
    """Build the HTTP application for an engine.

    The engine may still be loading: `/health` reports it, and completions are refused until it is ready. Requests are
    counted in `metrics`, by default a new instance. `resumption` serves answers of an earlier engine by their ids.
    """
    metrics = metrics or ApiMetrics(engine, tenants_max=settings.tenants_max)
    resumption = resumption or Resumption()
    bodies = RequestBodies(settings, keeps=resumption.journal is not None)
    return _application(
        [
            *_answering(engine, settings, metrics, bodies, resumption),
            *_operating(engine, metrics, bodies),
        ],
        settings,
    )


def create_front(
    engine: ServingContract, settings: ApiSettings, metrics: ApiMetrics, operations: ASGIApp
) -> Starlette:
    """Build the application of an API process, which has no engine: `operations` serves the operator routes."""
    bodies = RequestBodies(settings)
    # Only the paths and methods of these routes are used; their endpoints are never called.
    operating = _operating(cast("EngineContract", engine), metrics, bodies)
    return _application(
        [
            *_answering(engine, settings, metrics, bodies, Resumption()),
            *(Route(one.path, operations, methods=_methods(one)) for one in operating),
        ],
        settings,
    )


def create_operations(
    engine: EngineContract, settings: ApiSettings, metrics: ApiMetrics
) -> Starlette:
    """Build the operator routes that `create_front` forwards; access was checked there."""
    return _application(_operating(engine, metrics, RequestBodies(settings)), None)


def _answering(
    engine: ServingContract,
    settings: ApiSettings,
    metrics: ApiMetrics,
    bodies: RequestBodies,
    resumption: Resumption,
) -> list[Route]:
    """Routes for clients, and routes that need no engine."""
    described = Descriptions(engine)
    parts = engine, settings, metrics, bodies, resumption.journal
    messages = MessagesEndpoint(*parts)
    answering: dict[str, CompletionEndpoint] = {
        "/v1/chat/completions": ChatEndpoint(*parts),
        "/v1/completions": CompletionEndpoint(*parts),
        "/v1/responses": ResponsesEndpoint(*parts),
        "/v1/messages": messages,
    }
    resumption.serve(answering)
    return [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in answering.items()),
        Route("/v1/messages/count_tokens", CountTokensEndpoint(engine, messages), methods=["POST"]),
        *(
            KeptAnswerRoute(path, KeptAnswerEndpoint(resumption, path, endpoint))
            for path, endpoint in answering.items()
        ),
        Route("/v1/models", described.models),
        Route("/v1/models/{model:path}", described.model),
        Route("/tokenize", TokenizeEndpoint(engine, settings, bodies), methods=["POST"]),
        Route("/detokenize", DetokenizeEndpoint(engine, bodies), methods=["POST"]),
        Route("/health", described.health),
        Route("/ready", described.health),
        Route("/ping", described.health, methods=["GET", "POST"]),
        Route("/version", described.version),
        Route("/openapi.json", openapi.openapi),
        Route("/docs", openapi.page),
    ]


def _operating(engine: EngineContract, metrics: ApiMetrics, bodies: RequestBodies) -> list[Route]:
    """Routes for operators, which need the engine."""
    operations = Operations(engine, metrics)
    adapters = AdapterEndpoints(engine, bodies)
    return [
        Route("/load", operations.load),
        Route("/metrics", operations.metrics),
        Route("/admin/statistics", operations.statistics),
        Route("/admin/clear", operations.clear, methods=["POST"]),
        Route("/admin/replicas", operations.replicas),
        Route("/admin/replicas", ReplicasEndpoint(engine, bodies), methods=["POST"]),
        Route("/admin/policies", operations.policies),
        Route("/admin/policies", PoliciesEndpoint(engine, bodies), methods=["POST"]),
        Route("/admin/adapters", adapters.look),
        Route("/admin/adapters", Endpoint(adapters.load), methods=["POST"]),
        Route("/admin/adapters/{name:path}", Endpoint(adapters.unload), methods=["DELETE"]),
        Route("/v1/load_lora_adapter", Endpoint(adapters.load_lora), methods=["POST"]),
        Route("/v1/unload_lora_adapter", Endpoint(adapters.unload_lora), methods=["POST"]),
    ]


def _application(routes: list[Route], settings: ApiSettings | None) -> Starlette:
    """Build the application; without settings, access was checked by another process.

    Access checks wrap each route, after routing: a request with an unknown path or method gets a 404 or 405, not a
    misleading 401 or 415.
    """
    middleware, guards = access_middleware(settings) if settings is not None else ([], [])
    for route in routes:
        for guard, arguments, options in reversed(guards):
            route.app = guard(route.app, *arguments, **options)
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _no_route, Exception: _mistake},
    )
    app.router.redirect_slashes = False
    return app


def _methods(route: BaseRoute) -> list[str]:
    return sorted(route.methods or ()) if isinstance(route, Route) else []


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method, headers = request.url.path, request.method, {}
    if error.status_code == 405:
        taking = [one for one in request.app.routes if one.matches(request.scope)[0] != Match.NONE]
        methods = ", ".join(sorted({name for route in taking for name in _methods(route)}))
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
    form = MessagesForm() if is_anthropic_client(request.headers.raw) else form_of(path)
    response = json_response(form.error(refused), refused.status)
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


async def _mistake(request: Request, error: Exception) -> Response:
    del error
    failed = RequestFailed("the server made a mistake")
    response = json_response(form_of(request.url.path).error(failed), failed.status)
    # This handler runs outside all middleware, so the response is tagged here.
    response.headers["x-request-id"] = response_id(request.scope).decode()
    return response
