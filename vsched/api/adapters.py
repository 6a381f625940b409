"""Endpoints that list, load and unload adapters, in vsched's and in vLLM's format."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vsched.api.bodies.reading import RequestBodies
from vsched.api.contract import EngineContract
from vsched.api.http_exchange import HttpExchange
from vsched.api.operations import json_response
from vsched.api.request_schema import AdapterRequest, LoadLoraRequest, UnloadLoraRequest
from vsched.api.responses import AdapterList, AdapterRow
from vsched.errors import RequestRefused

TEXT = b"text/plain; charset=utf-8"


class AdapterEndpoints:
    """Adapter endpoints for operators; an operation continues if its client disconnects."""

    def __init__(self, engine: EngineContract, bodies: RequestBodies) -> None:
        self._engine = engine
        self._bodies = bodies

    async def look(self, request: Request) -> Response:
        """List the adapters."""
        del request
        return json_response(AdapterList([AdapterRow(**row) for row in self._engine.adapters()]))

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Load an adapter."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.answer(self._load(exchange))

    async def unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Unload an adapter."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.answer(self._unload(scope["path_params"]["name"]))

    async def load_lora(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Load an adapter, in vLLM's format."""
        exchange = HttpExchange(scope, receive, send)
        await _answer_in_text(exchange, self._load_lora(exchange))

    async def unload_lora(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Unload an adapter, in vLLM's format."""
        exchange = HttpExchange(scope, receive, send)
        await _answer_in_text(exchange, self._unload_lora(exchange))

    async def _load(self, exchange: HttpExchange) -> AdapterRow:
        requested = await self._bodies.read(exchange, AdapterRequest, tokens=0)
        exchange.release_room()  # loading may take long
        await self._engine.load_adapter(requested.name, requested.path)
        return next(
            AdapterRow(**row) for row in self._engine.adapters() if row["name"] == requested.name
        )

    async def _unload(self, name: str) -> AdapterRow:
        row = next((row for row in self._engine.adapters() if row["name"] == name), {})
        await self._engine.unload_adapter(name)
        return AdapterRow(**{**row, "state": "unloaded", "running": 0})

    async def _load_lora(self, exchange: HttpExchange) -> str:
        requested = await self._bodies.read(exchange, LoadLoraRequest, tokens=0)
        exchange.release_room()
        await self._engine.load_adapter(requested.lora_name, requested.lora_path)
        return f"Success: LoRA adapter {requested.lora_name!r} added successfully."

    async def _unload_lora(self, exchange: HttpExchange) -> str:
        requested = await self._bodies.read(exchange, UnloadLoraRequest, tokens=0)
        exchange.release_room()
        await self._engine.unload_adapter(requested.lora_name)
        return f"Success: LoRA adapter {requested.lora_name!r} removed successfully."


class Endpoint:
    """An ASGI application as an object, so that the router passes the connection to it unchanged."""

    def __init__(self, serve: Any) -> None:
        """Wrap a coroutine function that serves a connection."""
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._serve(scope, receive, send)


async def _answer_in_text(exchange: HttpExchange, work: Awaitable[str]) -> None:
    """Send a sentence, or an error with the status that vLLM uses for it."""

    async def answer() -> None:
        try:
            said = await work
        except RequestRefused as error:
            if error.status == 409:
                error.status = 400
            raise
        await exchange.send_bytes(said.encode(), content_type=TEXT)

    await exchange.answer_itself(answer())
