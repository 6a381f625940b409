"""The OpenAPI document, generated from the structs of requests and responses."""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec

from vsched.api.dialects.messages.answer import CountedTokens, MessagesEvent, MessagesResponse
from vsched.api.dialects.messages.schema import MessagesRequest
from vsched.api.dialects.responses.events import ResponseObject, ResponsesEvent
from vsched.api.dialects.responses.schema import ResponsesRequest
from vsched.api.errors import ErrorEnvelope
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
from vsched.api.responses import (
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
from vsched.api.wire_forms import MessagesError

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
