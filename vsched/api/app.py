"""The application: routes, access, and OpenAI-shaped errors for what no route takes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vsched.api.adapters import AdapterEndpoints, Endpoint
from vsched.api.bodies.reading import RequestBodies
from vsched.api.completions import ChatEndpoint, CompletionEndpoint
from vsched.api.contract import ApiSettings, EngineContract
from vsched.api.description import page
from vsched.api.dialects.messages.endpoints import CountTokensEndpoint, MessagesEndpoint
from vsched.api.dialects.responses.endpoint import ResponsesEndpoint
from vsched.api.errors import ParameterRefused
from vsched.api.metrics import ApiMetrics
from vsched.api.middleware.access import access_middleware
from vsched.api.middleware.request_id import response_id
from vsched.api.operations import (
    DetokenizeEndpoint,
    Operations,
    ReplicasEndpoint,
    TokenizeEndpoint,
    json_response,
)
from vsched.api.wire_forms import form_of
from vsched.errors import RequestFailed

_NO_ROUTE = {
    404: (
        "not_found",
        "there is nothing at this path. Remedy: check the URL; completions live under /v1.",
    ),
    405: ("method_not_allowed", "this path does not take this method. Remedy: check the method."),
}
_NO_VECTORS = (
    "vsched serves models that write: ranks sample and send tokens, never hidden states, so there are no embeddings, "
    "scores or classes. Remedy: send these requests to a server of an embedding model."
)
_NOT_SERVED = dict.fromkeys(
    ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank"),
    _NO_VECTORS,
)
"""Paths that clients of other servers know, and what to do without them."""


def create_app(engine: EngineContract, settings: ApiSettings) -> Starlette:
    """Build the HTTP application over an engine.

    The engine may still be loading: `/health` tells, and completions are refused until it is ready.
    """
    metrics = ApiMetrics(engine, tenants_max=settings.tenants_max)
    bodies = RequestBodies(settings)
    operations = Operations(engine, metrics)
    adapters = AdapterEndpoints(engine, bodies)
    messages = MessagesEndpoint(engine, settings, metrics, bodies)
    routes = [
        Route(
            "/v1/chat/completions",
            ChatEndpoint(engine, settings, metrics, bodies),
            methods=["POST"],
        ),
        Route(
            "/v1/completions",
            CompletionEndpoint(engine, settings, metrics, bodies),
            methods=["POST"],
        ),
        Route(
            "/v1/responses",
            ResponsesEndpoint(engine, settings, metrics, bodies),
            methods=["POST"],
        ),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", CountTokensEndpoint(engine, messages), methods=["POST"]),
        Route("/v1/models", operations.models),
        Route("/v1/models/{model:path}", operations.model),
        Route("/tokenize", TokenizeEndpoint(engine, settings, bodies), methods=["POST"]),
        Route("/detokenize", DetokenizeEndpoint(engine, bodies), methods=["POST"]),
        Route("/health", operations.health),
        Route("/ready", operations.health),
        Route("/ping", operations.health, methods=["GET", "POST"]),
        Route("/version", operations.version),
        Route("/load", operations.load),
        Route("/openapi.json", page.openapi),
        Route("/docs", page.page),
        Route("/metrics", operations.metrics),
        Route("/admin/statistics", operations.statistics),
        Route("/admin/clear", operations.clear, methods=["POST"]),
        Route("/admin/replicas", operations.replicas),
        Route("/admin/replicas", ReplicasEndpoint(engine, bodies), methods=["POST"]),
        Route("/admin/adapters", adapters.look),
        Route("/admin/adapters", Endpoint(adapters.load), methods=["POST"]),
        Route("/admin/adapters/{name:path}", Endpoint(adapters.unload), methods=["DELETE"]),
        Route("/v1/load_lora_adapter", Endpoint(adapters.load_lora), methods=["POST"]),
        Route("/v1/unload_lora_adapter", Endpoint(adapters.unload_lora), methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=access_middleware(settings),
        exception_handlers={HTTPException: _no_route, Exception: _mistake},
    )
    app.router.redirect_slashes = False
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, path = error.status_code, request.url.path
    code, message = _NO_ROUTE.get(status, (None, "the request cannot be served"))
    if status == 404:
        message = _NOT_SERVED.get(path, message)
    refused = ParameterRefused(message, param=None, code=code or "invalid_value", status=status)
    response = json_response(form_of(path).error(refused), status)
    response.headers.update(error.headers or {})
    return response


async def _mistake(request: Request, error: Exception) -> Response:
    del error
    failed = RequestFailed("the server made a mistake")
    response = json_response(form_of(request.url.path).error(failed), failed.status)
    # What answers this stands before all middleware.
    response.headers["x-request-id"] = response_id(request.scope).decode()
    return response
