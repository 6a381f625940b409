"""`X-Request-Id`: every response has one, the client's own if it sent one, so that both sides use the same id."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
