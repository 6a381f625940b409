"""The OpenAPI document, generated from the structs of requests and responses."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from html import escape
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vsched.api.compat.messages import CountedTokens, MessagesEvent, MessagesResponse
from vsched.api.compat.messages_schema import MessagesRequest
from vsched.api.compat.responses import ResponseObject, ResponsesEvent
from vsched.api.compat.responses_schema import ResponsesRequest
from vsched.api.errors import ErrorEnvelope
from vsched.api.http_exchange import MessagesError
from vsched.api.request_schema import (
    AdapterRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GroupRequest,
    LoadLoraRequest,
    PolicyTables,
    TokenizeRequest,
    UnloadLoraRequest,
)
from vsched.api.response_schema import (
    AdapterList,
    AdapterRow,
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    Detokenized,
    GroupAction,
    Load,
    Model,
    ModelList,
    State,
    Tokens,
    Version,
)

JSON = "application/json"
EVENTS = "text/event-stream"
_REFERENCE = "#/components/schemas/{name}"


class ApiOperation(NamedTuple):
    """Operation of one method on one path.

    `response` is the body on success, `event` the type of stream events, if any, `kind` the media type, and `error` the
    body of an error.
    """

    method: str
    path: str
    summary: str
    request: type | None = None
    response: type | None = None
    event: Any = None
    kind: str = JSON
    error: type = ErrorEnvelope


OPERATIONS: tuple[ApiOperation, ...] = (
    ApiOperation(
        "POST",
        "/v1/chat/completions",
        "Continue a conversation.",
        ChatRequest,
        ChatResponse,
        ChatChunk,
    ),
    ApiOperation(
        "POST",
        "/v1/completions",
        "Continue a text.",
        CompletionRequest,
        CompletionResponse,
        CompletionResponse,
    ),
    ApiOperation(
        "POST",
        "/v1/responses",
        "Continue a conversation, with OpenAI's Responses API.",
        ResponsesRequest,
        ResponseObject,
        ResponsesEvent,
    ),
    ApiOperation(
        "POST",
        "/v1/messages",
        "Continue a conversation, with Anthropic's Messages API.",
        MessagesRequest,
        MessagesResponse,
        MessagesEvent,
        error=MessagesError,
    ),
    ApiOperation(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation, with Anthropic's Messages API.",
        MessagesRequest,
        CountedTokens,
        error=MessagesError,
    ),
    ApiOperation(
        "GET",
        "/v1/chat/completions/{request_id}",
        "Fetch the response to a request that was resumed after a crash.",
        None,
        ChatResponse,
        ChatChunk,
    ),
    ApiOperation(
        "GET",
        "/v1/completions/{request_id}",
        "Fetch the response to a request that was resumed after a crash.",
        None,
        CompletionResponse,
        CompletionResponse,
    ),
    ApiOperation(
        "GET",
        "/v1/responses/{request_id}",
        "Fetch the response to a request that was resumed after a crash, with OpenAI's Responses API.",
        None,
        ResponseObject,
        ResponsesEvent,
    ),
    ApiOperation(
        "GET",
        "/v1/messages/{request_id}",
        "Fetch the response to a request that was resumed after a crash, with Anthropic's Messages API.",
        None,
        MessagesResponse,
        MessagesEvent,
        error=MessagesError,
    ),
    ApiOperation(
        "GET",
        "/v1/models",
        "List the served model and its adapters; in Anthropic's format with the header anthropic-version.",
        None,
        ModelList,
    ),
    ApiOperation(
        "GET",
        "/v1/models/{model}",
        "Describe the served model, or an adapter; in Anthropic's format with the header anthropic-version.",
        None,
        Model,
    ),
    ApiOperation("POST", "/tokenize", "Count the tokens of a prompt.", TokenizeRequest, Tokens),
    ApiOperation("POST", "/detokenize", "Convert tokens to text.", DetokenizeRequest, Detokenized),
    ApiOperation(
        "GET",
        "/health",
        "State of the engine: 200 if it accepts requests, otherwise 503.",
        None,
        State,
    ),
    ApiOperation("GET", "/ready", "The same as /health.", None, State),
    ApiOperation("GET", "/ping", "The same as /health.", None, State),
    ApiOperation("POST", "/ping", "The same as /health.", None, State),
    ApiOperation("GET", "/version", "Version of vsched.", None, Version),
    ApiOperation("GET", "/load", "Number of requests in progress.", None, Load),
    ApiOperation("GET", "/metrics", "Metrics for Prometheus.", kind="text/plain"),
    ApiOperation("GET", "/openapi.json", "This document."),
    ApiOperation("GET", "/docs", "This document as a page.", kind="text/html"),
    ApiOperation("GET", "/admin/statistics", "Counters and measurements of the engine."),
    ApiOperation("POST", "/admin/clear", "Abort all requests."),
    ApiOperation("GET", "/admin/replicas", "All groups: state, ranks, last loss."),
    ApiOperation(
        "POST", "/admin/replicas", "Drain, restart or resume a group.", GroupRequest, GroupAction
    ),
    ApiOperation("GET", "/admin/policies", "The policy of each table.", None, PolicyTables),
    ApiOperation(
        "POST",
        "/admin/policies",
        "Replace policies while requests run.",
        PolicyTables,
        PolicyTables,
    ),
    ApiOperation("GET", "/admin/adapters", "All adapters.", None, AdapterList),
    ApiOperation("POST", "/admin/adapters", "Load an adapter.", AdapterRequest, AdapterRow),
    ApiOperation("DELETE", "/admin/adapters/{name}", "Unload an adapter.", None, AdapterRow),
    ApiOperation(
        "POST",
        "/v1/load_lora_adapter",
        "Load an adapter, in vLLM's format.",
        LoadLoraRequest,
        kind="text/plain",
    ),
    ApiOperation(
        "POST",
        "/v1/unload_lora_adapter",
        "Unload an adapter, in vLLM's format.",
        UnloadLoraRequest,
        kind="text/plain",
    ),
)


@functools.cache
def document() -> dict[str, Any]:
    """Build the document; it is the same for every model."""
    kinds = {
        kind: None
        for each in OPERATIONS
        for kind in (each.request, each.response, each.event, each.error)
        if kind is not None
    }
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    references = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = _described(each, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "vsched", "version": version("vsched")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(each: ApiOperation, references: dict[type, Any]) -> dict[str, Any]:
    content = {each.kind: {"schema": references[each.response]} if each.response else {}}
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
    if "{" in each.path:
        name = each.path.partition("{")[2].removesuffix("}")
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [parameter]
    return described


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font-size:.9em}table{border-collapse:collapse}td{padding:.1rem 1rem .1rem 0;"
    "vertical-align:top}summary{cursor:pointer}details{margin:.3rem 0}"
)


async def openapi(request: Request) -> Response:
    """Return the OpenAPI document."""
    del request
    return Response(_encoded(), media_type=JSON)


async def page(request: Request) -> Response:
    """Return the page."""
    del request
    headers = {"content-security-policy": _POLICY}
    return Response(rendered(document()), media_type="text/html", headers=headers)


@functools.cache
def _encoded() -> bytes:
    return json.dumps(document()).encode()


def rendered(found: dict[str, Any]) -> str:
    """Format an OpenAPI document as HTML: the paths, then the fields of every struct."""
    info = found["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    lines = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<style>{_STYLE}</style><h1>{title}</h1>",
        '<p>The same as a document: <a href="openapi.json">openapi.json</a>.</p><table>',
    ]
    for path, methods in found["paths"].items():
        lines += [_operation(method, path, each) for method, each in methods.items()]
    lines.append("</table><h2>Bodies</h2>")
    for name, schema in found["components"]["schemas"].items():
        lines += _struct(name, schema)
    return "\n".join(lines)


def _operation(method: str, path: str, each: dict[str, Any]) -> str:
    body = each.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema")
    takes = f" Takes {_kind(body)}." if body else ""
    name = f"<code>{method.upper()} {escape(path)}</code>"
    return f"<tr><td>{name}<td>{escape(each['summary'])}{takes}"


def _struct(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> '
    yield f"{escape(schema.get('description', ''))}</summary><table>"
    required = schema.get("required", ())
    for field, kind in schema.get("properties", {}).items():
        note = "required" if field in required else escape(json.dumps(kind.get("default")))
        yield f"<tr><td><code>{escape(field)}</code><td>{_kind(kind)}<td>{note}"
    yield "</table></details>"


def _kind(schema: dict[str, Any]) -> str:
    """Describe a schema in words."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if choices := schema.get("anyOf"):
        return " or ".join(map(_kind, choices))
    if "enum" in schema:
        return " or ".join(escape(json.dumps(value)) for value in schema["enum"])
    kind = escape(str(schema.get("type", "anything")))
    if isinstance(items := schema.get("items"), dict):
        return f"{kind} of {_kind(items)}"
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", "&gt;"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "&lt;"),
        )
        if key in schema
    ]
    return f"{kind} {' '.join(bounds)}".rstrip()
