"""`X-Request-Id`: every response has one, the client's own if it sent one, so that both sides use the same id."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vsched.logs import FIELDS

HEADER = b"x-request-id"
_CLEAN = re.compile(rb"[\w.:/+=-]{1,128}", re.ASCII)
"""Ids that are safe to send back in a header and to log; any other id is ignored."""


def sent_id(scope: Scope) -> str:
    """Id that the client gave its request; empty if it sent none, or an unsafe one."""
    for name, value in scope["headers"]:
        if name == HEADER and _CLEAN.fullmatch(value):
            return bytes(value).decode("ascii")
    return ""


def new_id(prefix: str, scope: Scope) -> str:
    """Create a unique id, which includes the client's own."""
    given = sent_id(scope)
    return (
        f"{prefix}-{given}-{secrets.token_hex(4)}" if given else f"{prefix}-{secrets.token_hex(12)}"
    )


def response_id(scope: Scope) -> bytes:
    """Id for a response that has none of its own."""
    return sent_id(scope).encode() or secrets.token_hex(16).encode()


class TagResponses:
    """ASGI middleware: give every response the header; the client's own id takes precedence."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request, and tag its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        def tagged(message: Message) -> Awaitable[None]:
            # Not a coroutine, because it is called for every event of a stream.
            if message["type"] == "http.response.start":
                message = {**message, "headers": _with_id(scope, message.get("headers", ()))}
            return send(message)

        await self._app(scope, receive, tagged)


def _with_id(scope: Scope, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    own = next((value for name, value in headers if name == HEADER), b"")
    chosen = sent_id(scope).encode() or own or response_id(scope)
    return [*((name, value) for name, value in headers if name != HEADER), (HEADER, chosen)]


logger = logging.getLogger("vsched.access")
_PROBES = frozenset({"/health", "/ready", "/ping"})
_PATH_CHARACTERS_MAX = 200
_REFUSAL = "vsched.refusal"
_DISCONNECTED = 499
"""Status in the log of a request without a response, as in nginx."""
_LOG_FIELDS = "vsched.log_fields"
"""Key of further fields of the access log in the ASGI scope; a dictionary, since inner scopes may be copies."""


class LogAccess:
    """ASGI middleware: log method, path, status, duration and id of each request, but not its query or content.

    Probes that succeed are left out. A status of 499 means that the client disconnected before the response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request, and log it at its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        connection_scope, status, request_id = scope, 0, ""
        further: dict[str, str] = {}
        scope = {**scope, _LOG_FIELDS: further}

        def watched(message: Message) -> Awaitable[None]:
            # Not a coroutine, because it is called for every event of a stream.
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = dict(message.get("headers", ()))
                request_id = bytes(headers.get(HEADER, b"")).decode("ascii")
            return send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if not status:
                status, request_id = refusal_of(connection_scope)
                status = status or _DISCONNECTED
            if scope["path"] not in _PROBES or status != 200:
                duration_ms = (time.monotonic() - started_s) * 1e3
                log_access(scope, status, request_id, duration_ms, further)


def note_refusal(scope: Any, status: int, request_id: str) -> None:
    """Note that the connection answered a request in place of the application."""
    scope[_REFUSAL] = status, request_id


def refusal_of(scope: Scope) -> tuple[int, str]:
    """Return status and id of the connection's own answer; 0 if there is none."""
    refusal: tuple[int, str] = scope.get(_REFUSAL, (0, ""))
    return refusal


def log_field(scope: Scope, name: str, value: str) -> None:
    """Add a field to the access log line of a request."""
    scope.get(_LOG_FIELDS, {})[name] = value


def log_access(
    scope: Scope,
    status: int,
    request_id: str,
    duration_ms: float,
    further: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Log a request; method and path are missing in the scope of one that could not be parsed."""
    client = scope.get("client")
    address = client[0] if client else "-"
    path = quote(
        scope.get("path", "-")[:_PATH_CHARACTERS_MAX]
    )  # no line breaks of a client in the log
    fields = {
        "client": address,
        "method": scope.get("method", "-"),
        "path": path,
        "status": status,
        "duration_ms": round(duration_ms, 1),
        "request_id": request_id,
        **further,
    }
    logger.info(
        "%s %s %s %d %.1f ms %s" + " %s" * len(further),
        *fields.values(),
        extra={FIELDS: fields},
    )
