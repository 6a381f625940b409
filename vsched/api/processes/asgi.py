"""Forwarding of complete HTTP requests from an API process to an application in the engine's process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from vsched.api.http_exchange import ROOMLESS_BYTES, HttpExchange
from vsched.api.processes.messages import Ask, HttpReply
from vsched.errors import RequestRefused, limit_message

Message = MutableMapping[str, Any]


class AskEngine:
    """ASGI application that forwards requests to the engine's process; a disconnect does not cancel them."""

    def __init__(self, ask: Callable[[Callable[[int], Ask]], Awaitable[HttpReply]]) -> None:
        """Use `ask` to send messages: it assigns a number to a message and returns the reply."""
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.answer_itself(self._answer(exchange, scope, send))

    async def _answer(self, exchange: HttpExchange, scope: Scope, send: Send) -> None:
        pieces = await exchange.read_body(ROOMLESS_BYTES, _no_room)

        def requested(number: int) -> Ask:
            return Ask(
                number=number,
                method=scope["method"],
                path=scope["path"],
                query=scope.get("query_string", b""),
                headers=[(bytes(name), bytes(value)) for name, value in scope["headers"]],
                body=b"".join(pieces),
            )

        reply = await self._ask(requested)
        exchange.started = True
        await send(
            {"type": "http.response.start", "status": reply.status, "headers": reply.headers}
        )
        await send({"type": "http.response.body", "body": reply.body})


async def _no_room(size: int) -> Any:
    message = limit_message(
        "the request body is too large for this path",
        value=f"{size} bytes",
        limit=f"{ROOMLESS_BYTES} bytes with several server.processes",
        remedy="send a smaller body",
    )
    raise RequestRefused(message, code="body_too_large", status=413)


async def respond(app: ASGIApp, requested: Ask) -> HttpReply:
    """Run an application on a forwarded request and return its response; the client never disconnects.

    Blocks: until the application is done.
    """
    bodies = [requested.body]
    status, headers, content = 500, [], bytearray()

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        else:
            content.extend(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": requested.method,
        "path": requested.path,
        "raw_path": requested.path.encode(),
        "query_string": requested.query,
        "root_path": "",
        "headers": requested.headers,
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return HttpReply(requested.number, status, headers, bytes(content))
