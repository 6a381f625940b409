"""The OpenAPI document, generated from the structs of requests and responses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from types import MethodType, UnionType
from typing import Any, get_args, get_type_hints

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from vsched.api.errors import ErrorEnvelope
from vsched.api.http_exchange import HttpExchange

JSON = "application/json"
EVENTS = "text/event-stream"
_TEXT = b"text/plain; charset=utf-8"
_REFERENCE = "#/components/schemas/{name}"


class JsonEndpoint:
    """An ASGI application: sends the result of a method, a text as it is and others as JSON, unless it has responded.

    Of the parameters of the method, `request` is the body, as `read_body` of its object decodes it, and `exchange` the
    exchange.
    """

    def __init__(self, handler: MethodType, hints: Mapping[str, Any]) -> None:
        self._handler = handler
        self._hints = hints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.serve_response(self._serve(exchange))

    async def _serve(self, exchange: HttpExchange) -> None:
        arguments: dict[str, Any] = {}
        if "exchange" in self._hints:
            arguments["exchange"] = exchange
        if "request" in self._hints:
            endpoints: Any = self._handler.__self__
            arguments["request"] = await endpoints.read_body(exchange, self._hints["request"])
        result = await self._handler(**arguments)
        if isinstance(result, str):
            await exchange.send_bytes(result.encode(), content_type=_TEXT)
        elif not exchange.started:
            await exchange.send_json(result)


class ApiRoute(Route):
    """One method of one path, to a method whose annotations have the types, or to an application that has them.

    The docstring of the endpoint is its summary.

    Attributes:
        request: Type of the body, if any.
        response: Type of the body on success.
        event: Type of stream events, if any.
        media_type: Media type of the response.
        error: Type of the body of an error.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        *,
        media_type: str = JSON,
        **kinds: Any,
    ) -> None:
        """Create a route; `kinds` are types that the endpoint does not declare."""
        declared = dict(getattr(endpoint, "kinds", {}))
        application: Any = endpoint
        if isinstance(endpoint, MethodType):
            hints = get_type_hints(endpoint)
            application = JsonEndpoint(endpoint, hints)
            response = hints["return"]
            if response is str:
                media_type, response = "text/plain", None
            if response is not type(None):
                # Of a union, the documented form.
                is_union = isinstance(response, UnionType)
                declared["response"] = get_args(response)[0] if is_union else response
            declared["request"] = hints.get("request")
        super().__init__(path, application, methods=[method])
        kinds = {**declared, **kinds}
        self.method = method
        self.summary = (inspect.getdoc(endpoint) or "").partition("\n")[0]
        self.request = kinds.get("request")
        self.response = kinds.get("response")
        self.event = kinds.get("event")
        self.error = kinds.get("error", ErrorEnvelope)
        self.media_type = media_type


get, post = functools.partial(ApiRoute, "GET"), functools.partial(ApiRoute, "POST")


class Documentation:
    """The document of some routes, the same for every model."""

    def __init__(self) -> None:
        self.routes: Sequence[ApiRoute] = ()

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """The OpenAPI document."""
        return document(self.routes)

    async def openapi(self, exchange: HttpExchange) -> None:
        """This document."""
        await exchange.send_json(self.document)


def document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """Build the OpenAPI document of these routes."""
    kinds = {
        kind: None
        for each in routes
        for kind in (each.request, each.response, each.event, each.error)
        if kind is not None
    }
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    references = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for each in routes:
        paths.setdefault(each.path_format, {})[each.method.lower()] = _described(each, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "vsched", "version": version("vsched")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(each: ApiRoute, references: dict[type, Any]) -> dict[str, Any]:
    content = {each.media_type: {"schema": references[each.response]} if each.response else {}}
    if each.event is not None:
        content[EVENTS] = {"schema": references[each.event]}
    described: dict[str, Any] = {
        "summary": each.summary,
        "responses": {
            "200": {"description": "Success.", "content": content},
            "default": {
                "description": "An error.",
                "content": {JSON: {"schema": references[each.error]}},
            },
        },
        "security": [{}, {"key": []}],
    }
    if each.request is not None:
        body = {JSON: {"schema": references[each.request]}}
        described["requestBody"] = {"required": True, "content": body}
    if each.param_convertors:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in each.param_convertors
        ]
    return described
