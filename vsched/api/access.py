"""Who may call: an API key in front of everything but `/health`."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from vsched.api.http_exchange import HttpExchange
from vsched.errors import RequestRefused

_OPEN_PATHS = frozenset({"/health"})


def _digest(secret: bytes) -> bytes:
    # Digests have one length, so that the comparison tells nothing of the key's.
    return hashlib.sha256(secret).digest()


class RequireKey:
    """ASGI middleware: default deny, judged on `scope["path"]` as the router sees it."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        assert api_key
        self._app = app
        self._expected = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is authorised; answer 401 to what is not."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        exchange = HttpExchange(scope, receive, send)
        if scope["path"] in _OPEN_PATHS or self._is_authorised(exchange):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong. Remedy: send Authorization: Bearer <key>."
        await exchange.send_error(RequestRefused(message, code="invalid_api_key", status=401))

    def _is_authorised(self, exchange: HttpExchange) -> bool:
        scheme, _, key = (exchange.header(b"authorization") or b"").partition(b" ")
        matches = hmac.compare_digest(_digest(key.strip()), self._expected)
        return matches and scheme.lower() == b"bearer"
