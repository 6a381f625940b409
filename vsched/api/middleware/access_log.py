"""Access log: a line for each HTTP request, when its response has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vsched.api.middleware.request_id import HEADER
from vsched.logs import FIELDS

logger = logging.getLogger("vsched.access")
_PROBES = frozenset({"/health", "/ready", "/ping"})
_PATH_CHARACTERS_MAX = 200


class LogAccess:
    """ASGI middleware: log method, path, status, duration and id of each request, but not its query or content.

    Probes that succeed are left out. A status of 0 means that the client disconnected before the response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request, and log it at its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        status, request_id = 0, ""

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
            if scope["path"] not in _PROBES or status != 200:
                _log(scope, status, request_id, (time.monotonic() - started_s) * 1e3)


def _log(scope: Scope, status: int, request_id: str, duration_ms: float) -> None:
    client = scope.get("client")
    address = client[0] if client else "-"
    path = quote(scope["path"][:_PATH_CHARACTERS_MAX])  # no line breaks of a client in the log
    fields = {
        "client": address,
        "method": scope["method"],
        "path": path,
        "status": status,
        "duration_ms": round(duration_ms, 1),
        "request_id": request_id,
    }
    logger.info(
        "%s %s %s %d %.1f ms %s",
        *fields.values(),
        extra={FIELDS: fields},
    )
