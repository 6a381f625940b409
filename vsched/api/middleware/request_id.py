"""`X-Request-Id`: every response has one, the client's where it sent one, so that both sides name it alike."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_CLEAN = re.compile(rb"[\w.:/+=-]{1,128}", re.ASCII)
"""What may come back in a header and go into logs; anything else is treated as if it had not been sent."""


def sent_id(scope: Scope) -> str:
    """Return the id that a client gave its request; empty where it gave none, or none that can be sent back."""
    for name, value in scope["headers"]:
        if name == HEADER and _CLEAN.fullmatch(value):
            return bytes(value).decode("ascii")
    return ""


def new_id(prefix: str, scope: Scope) -> str:
    """Return an id that no other request has; the client's own is a part of it."""
    given = sent_id(scope)
    return (
        f"{prefix}-{given}-{secrets.token_hex(4)}" if given else f"{prefix}-{secrets.token_hex(12)}"
    )


def response_id(scope: Scope) -> bytes:
    """Return what a response is tagged with that has no id of its own."""
    return sent_id(scope).encode() or secrets.token_hex(16).encode()


class TagResponses:
    """ASGI middleware: give every response the header; an id that the client sent goes before any other."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request, and tag its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        def tagged(message: Message) -> Awaitable[None]:
            # No coroutine of its own: this is called for every event of a stream.
            if message["type"] == "http.response.start":
                message = {**message, "headers": _with_id(scope, message.get("headers", ()))}
            return send(message)

        await self._app(scope, receive, tagged)


def _with_id(scope: Scope, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    own = next((value for name, value in headers if name == HEADER), b"")
    chosen = sent_id(scope).encode() or own or response_id(scope)
    return [*((name, value) for name, value in headers if name != HEADER), (HEADER, chosen)]
