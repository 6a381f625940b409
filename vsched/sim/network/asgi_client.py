"""An in-process ASGI client on the application's loop.

It follows uvicorn: after a disconnect, `receive` returns `http.disconnect` and sent messages are
dropped; `receive` returns the same after a complete response. Unlike uvicorn, it asserts the
protocol rules: one `receive` at a time, one response start, nothing after the end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, Self

import msgspec
from starlette.types import ASGIApp, Message

HeaderLines = Iterable[tuple[str, str]]


class Response(msgspec.Struct, frozen=True):
    """A complete response."""

    status: int
    headers: dict[str, str]
    chunks: list[bytes]

    @property
    def body(self) -> bytes:
        """The complete body."""
        return b"".join(self.chunks)

    def json(self) -> Any:
        """Decode the body as JSON."""
        return msgspec.json.decode(self.body)


class Disconnected(ConnectionError):
    """The response was incomplete when the client left or the application ended."""


class AsgiClient:
    """Sends requests to an application; each task can have one in progress.

    Args:
        app: The application; its lifespan is not run.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        body: bytes = b"",
        headers: HeaderLines = (),
    ) -> Response:
        """Send a request and return the complete response.

        Raises:
            Exception: Any exception raised by the application.
        """
        async with self.open(method, path, json=json, body=body, headers=headers) as call:
            return await call.response()

    def open(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        body: bytes = b"",
        pieces: AsyncIterator[bytes] | None = None,
        headers: HeaderLines = (),
    ) -> HttpCall:
        """Return a request for `async with`, to be read in chunks and abandoned at any time.

        Args:
            method: `GET` and so on.
            path: With the query, if any.
            json: Body to be encoded as JSON, instead of `body`.
            body: Raw body.
            pieces: Body in pieces, sent as slowly as this iterator yields them.
            headers: Further headers, or one in place of `content-length` or `host`.
        """
        lines = [(name.lower(), value) for name, value in headers]
        if json is not None:
            body = msgspec.json.encode(json)
            lines.append(("content-type", "application/json"))
        given = {name for name, _ in lines}
        if "content-length" not in given:
            length = ("content-length", str(len(body)))
            lines.append(length if pieces is None else ("transfer-encoding", "chunked"))
        if "host" not in given:
            lines.append(("host", "localhost"))
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in lines],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        return HttpCall(self._app, scope, body=body, pieces=pieces)


class HttpCall:
    """One request, from its first byte to the end of the application's work on it.

    Attributes:
        receives: Number of `receive` calls by the application.
    """

    def __init__(
        self,
        app: ASGIApp,
        scope: dict[str, Any],
        *,
        body: bytes,
        pieces: AsyncIterator[bytes] | None,
    ) -> None:
        self.receives = 0
        self._receiving = False
        self._app = app
        self._scope = scope
        self._upload = deque([body] if pieces is None else [])
        self._uploaded = pieces is None
        self._pieces = pieces
        self._pump: asyncio.Task[None] | None = None
        self._status: int | None = None
        self._headers: dict[str, str] = {}
        self._chunks: list[bytes] = []
        self._read = 0
        self._complete = False
        self._disconnected = False
        self._changed: list[asyncio.Future[None]] = []
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        loop = self._loop = asyncio.get_running_loop()
        self._work = loop.create_task(self._run_app())
        if self._pieces is not None:
            self._pump = loop.create_task(self._send_pieces(self._pieces))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Disconnect if the response is incomplete, and wait for the application to finish."""
        del kind, trace
        assert self._work is not None
        if not self._complete:
            self.disconnect()
        await asyncio.wait([self._work])
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
        if error is None:
            self._work.result()

    async def started(self) -> int:
        """Wait for the response to start; return its status.

        Raises:
            Disconnected: When it never started.
        """
        await self._until(lambda: self._status is not None)
        assert self._status is not None
        return self._status

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the chunks of the body as they arrive.

        Raises:
            Disconnected: When the body was incomplete.
        """
        while True:
            await self._until(lambda: self._complete or self._read < len(self._chunks))
            if self._read == len(self._chunks):
                return
            self._read += 1
            self._notify()
            yield self._chunks[self._read - 1]

    async def events(self) -> AsyncIterator[str]:
        """Yield the data of server-sent events as they arrive, including `[DONE]`.

        Raises:
            Disconnected: When the body was incomplete.
        """
        rest = b""
        async for chunk in self.chunks():
            *complete, rest = (rest + chunk).split(b"\n\n")
            for event in complete:
                lines = event.decode().split("\n")
                data = [line[5:].removeprefix(" ") for line in lines if line.startswith("data:")]
                if data:
                    yield "\n".join(data)

    async def response(self) -> Response:
        """Return the complete response.

        Raises:
            Disconnected: When it was incomplete.
        """
        async for _ in self.chunks():
            pass
        await self.started()
        return self.response_so_far()

    def response_so_far(self) -> Response:
        """Return the part of the response received so far; the status is 0 before it starts."""
        return Response(self._status or 0, self._headers, self._chunks)

    def disconnect(self) -> None:
        """Disconnect now; reading the response raises `Disconnected`."""
        self._disconnected = True
        self._notify()

    def cancel(self) -> None:
        """Cancel the application's task, as a stopping server does."""
        assert self._work is not None, "the request was not started"
        self._work.cancel()

    @property
    def over(self) -> bool:
        """Whether the application has finished this request."""
        return self._work is not None and self._work.done()

    # --- the application's side ---

    async def _run_app(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            self._loop.call_soon(self._notify)

    async def _receive(self) -> Message:
        assert not self._receiving, "receive() has one owner"
        self.receives += 1
        self._receiving = True
        try:
            await self._wait(lambda: bool(self._upload) or self._disconnected or self._complete)
        finally:
            self._receiving = False
        if self._upload and not self._disconnected:
            piece = self._upload.popleft()
            more = bool(self._upload) or not self._uploaded
            return {"type": "http.request", "body": piece, "more_body": more}
        return {"type": "http.disconnect"}

    async def _send_pieces(self, pieces: AsyncIterator[bytes]) -> None:
        async for piece in pieces:
            self._upload.append(piece)
            self._notify()
        self._upload.append(b"")
        self._uploaded = True
        self._notify()

    async def _send(self, message: Message) -> None:
        if self._disconnected:
            return
        assert not self._complete, "nothing may follow the end of a response"
        if message["type"] == "http.response.start":
            assert self._status is None, "one response"
            self._status = message["status"]
            self._headers = {
                name.decode(): value.decode() for name, value in message.get("headers", ())
            }
        else:
            body = message.get("body", b"")
            if body:
                self._chunks.append(bytes(body))
            self._complete = not message.get("more_body", False)
        self._notify()

    # --- waiting ---

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition of the response; raise if it can no longer hold."""
        await self._wait(lambda: holds() or self._disconnected or self.over)
        if holds():
            return
        if self._work is not None and self.over and not self._work.cancelled():
            self._work.result()
        raise Disconnected(
            "the client left"
            if self._disconnected
            else "the application ended before its response was complete"
        )

    async def _wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            change = self._loop.create_future()
            self._changed.append(change)
            await change

    def _notify(self) -> None:
        changed, self._changed = self._changed, []
        for change in changed:
            if not change.done():
                change.set_result(None)
