"""The application: routes, access, and OpenAI-shaped errors for what no route takes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from vsched.api.adapters import AdapterEndpoints, Endpoint
from vsched.api.bodies.reading import RequestBodies
from vsched.api.completions import ChatEndpoint, CompletionEndpoint
from vsched.api.contract import ApiSettings, EngineContract, ServingContract
from vsched.api.description import page
from vsched.api.dialects.messages.endpoints import CountTokensEndpoint, MessagesEndpoint
from vsched.api.dialects.responses.endpoint import ResponsesEndpoint
from vsched.api.errors import ParameterRefused
from vsched.api.metrics import ApiMetrics
from vsched.api.middleware.access import access_middleware
from vsched.api.middleware.request_id import response_id
from vsched.api.operations import (
    Descriptions,
    DetokenizeEndpoint,
    Operations,
    ReplicasEndpoint,
    TokenizeEndpoint,
    json_response,
)
from vsched.api.resuming.endpoint import KeptAnswerEndpoint, KeptAnswerRoute
from vsched.api.resuming.resumption import Resumption
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
OPERATIONS = (
    "/load",
    "/metrics",
    "/admin/{rest:path}",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
"""What a process without an engine of its own asks the engine's for."""


def create_app(
    engine: EngineContract,
    settings: ApiSettings,
    metrics: ApiMetrics | None = None,
    *,
    resumption: Resumption | None = None,
) -> Starlette:
    """Build the HTTP application over an engine.

    The engine may still be loading: `/health` tells, and completions are refused until it is ready. `metrics` are
    those that requests are counted in, by default its own. What `resumption` has of an engine before this one is told
    by the ids of its answers.
    """
    metrics = metrics or ApiMetrics(engine, tenants_max=settings.tenants_max)
    resumption = resumption or Resumption()
    bodies = RequestBodies(settings, keeps=resumption.journal is not None)
    return _application(
        [
            *_answering(engine, settings, metrics, bodies, resumption),
            *_operating(engine, metrics, bodies),
        ],
        access_middleware(settings),
    )


def create_front(
    engine: ServingContract, settings: ApiSettings, metrics: ApiMetrics, operations: ASGIApp
) -> Starlette:
    """Build the application of a process that has no engine of its own: `operations` has what only that can tell."""
    return _application(
        [
            *_answering(engine, settings, metrics, RequestBodies(settings), Resumption()),
            *(Route(path, operations) for path in OPERATIONS),
        ],
        access_middleware(settings),
    )


def create_operations(
    engine: EngineContract, settings: ApiSettings, metrics: ApiMetrics
) -> Starlette:
    """Build what `create_front` leaves out; who may call was judged there."""
    return _application(_operating(engine, metrics, RequestBodies(settings)), [])


def _answering(
    engine: ServingContract,
    settings: ApiSettings,
    metrics: ApiMetrics,
    bodies: RequestBodies,
    resumption: Resumption,
) -> list[Route]:
    """Return the routes of clients, and those of what a process knows by itself."""
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
        Route("/openapi.json", page.openapi),
        Route("/docs", page.page),
    ]


def _operating(engine: EngineContract, metrics: ApiMetrics, bodies: RequestBodies) -> list[Route]:
    """Return the routes of operators: what the engine alone can tell, and do."""
    operations = Operations(engine, metrics)
    adapters = AdapterEndpoints(engine, bodies)
    return [
        Route("/load", operations.load),
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


def _application(routes: list[Route], middleware: list[Middleware]) -> Starlette:
    app = Starlette(
        routes=routes,
        middleware=middleware,
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
