"""One HTTP exchange: the only place that calls `receive()`.

ASGI tells of a disconnect through `receive()` alone, and only to whoever asks. So one object owns it: first it reads
the body within its bound, then, while the request is worked on, it waits for the disconnect and cancels the work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from vsched.api.errors import ClientDisconnected
from vsched.api.wire_forms import form_of
from vsched.errors import RequestFailed, RequestRefused, limit_message

logger = logging.getLogger(__name__)

T = TypeVar("T")
Headers = Iterable[tuple[bytes, bytes]]

_ENCODER = msgspec.json.Encoder()
_SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
ROOMLESS_BYTES = 64 * 1024
"""A body up to this size is held without room: a connection's own buffer is as large."""


class Room(Protocol):
    """What a large body takes of the memory for all of them."""

    def release(self) -> None:
        """Give it back; calling it again does nothing."""
        ...


class HttpExchange:
    """A request being read and a response being written, in the form that clients of its path read.

    Attributes:
        started: Whether the response has begun.
        body: What was sent, where it is to be kept; empty once it is.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.started = False
        self.body = b""
        self._form = form_of(scope.get("path", ""))
        self._receive = receive
        self._send = send
        self._body_read = False
        self._room: Room | None = None
        self._finished = False

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header, by its lower-case name."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    async def read_body(self, limit: int, room: Callable[[int], Awaitable[Room]]) -> list[bytes]:
        """Return the body in pieces, holding no more than `limit` bytes of it, and those of a large one in `room`.

        Raises:
            RequestRefused: With status 413, before reading when the length was announced; as `room` does.
            ClientDisconnected: When the client left before it was complete.
        """
        announced = self.header(b"content-length")
        expected = 0
        if announced is not None and announced.isdigit():
            expected = int(announced[:18])
            if expected > limit:
                raise _too_large(str(expected), limit)
        pieces: list[bytes] = []
        size = 0
        while True:
            if self._room is None and max(size, expected) > ROOMLESS_BYTES:
                self._room = await room(expected or limit)
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise _too_large(f"over {limit}", limit)
            pieces.append(piece)
            if not message.get("more_body", False):
                self._body_read = True
                return pieces

    def release_room(self) -> None:
        """Give the room of the body back; its bytes are held no more. Calling it again does nothing."""
        if self._room is not None:
            self._room.release()

    async def until_disconnect(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` comes to, cancelling it when the client goes away.

        Raises:
            ClientDisconnected: When that happened; `work` has ended by then.
        """
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch())
                result = await work
                watcher.cancel()
        except BaseExceptionGroup as group_error:
            # What the work raised tells more than the disconnect that may have come with it.
            errors = group_error.exceptions
            raise next(
                (error for error in errors if not isinstance(error, ClientDisconnected)), errors[0]
            ) from None
        return result

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # Servers report the end of a complete response in the same words.
        if not self._finished:
            raise ClientDisconnected

    async def answer(self, work: Awaitable[object]) -> None:
        """Send what `work` comes to as JSON, or its error; nothing when the client has left."""

        async def answered() -> None:
            await self.send_json(await work)

        await self.answer_itself(answered())

    async def answer_itself(self, work: Awaitable[None]) -> None:
        """Have `work` send its answer; send its error where it has one, and nothing when the client has left."""
        try:
            await work
        except ClientDisconnected:
            return
        except (RequestRefused, RequestFailed) as error:
            await self.send_error(error)
        except Exception:
            logger.exception("a request for %s failed", self.scope["path"])
            await self.send_error(RequestFailed("the server made a mistake"))
        finally:
            self.release_room()

    async def send_json(self, content: object, *, status: int = 200, headers: Headers = ()) -> None:
        """Send a whole JSON response."""
        await self.send_bytes(
            _ENCODER.encode(content),
            content_type=b"application/json",
            status=status,
            headers=headers,
        )

    async def send_bytes(
        self, body: bytes, *, content_type: bytes, status: int = 200, headers: Headers = ()
    ) -> None:
        """Send a whole response."""
        self.started = True
        fixed = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*fixed, *headers]}
        )
        self._finished = True
        await self._send({"type": "http.response.body", "body": body})

    async def send_error(self, error: RequestRefused | RequestFailed) -> None:
        """Send an error with its status; on a stream that has begun, as its last event."""
        if self.started:
            await self._send_events(self._form.error_events(error))
            await self.end_stream()
            return
        headers: list[tuple[bytes, bytes]] = []
        retry_after_s = getattr(error, "retry_after_s", None)
        if retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % retry_after_s))
        location = getattr(error, "location", "")
        if location:
            headers.append((b"location", location.encode() + self._target()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if not self._body_read and self.scope["method"] == "POST":
            # The rest of the body is not worth reading, so the connection cannot be used again.
            headers.append((b"connection", b"close"))
        await self.send_json(
            self._form.error(error), status=self._form.status(error), headers=headers
        )

    def _target(self) -> bytes:
        """Return the path and the query of the request, as they were sent."""
        query: bytes = self.scope.get("query_string", b"")
        path: bytes = self.scope.get("raw_path") or self.scope["path"].encode()
        return path + (b"?" + query if query else b"")

    async def start_stream(self, headers: Headers = ()) -> None:
        """Begin a stream of server-sent events."""
        self.started = True
        await self._send(
            {"type": "http.response.start", "status": 200, "headers": [*_SSE_HEADERS, *headers]}
        )

    @property
    def numbers_events(self) -> bool:
        """Whether the events of a stream have numbers."""
        return self._form.after is not None

    def number_events(self, *, after: int = -1) -> None:
        """Let the events of a stream have their numbers, from 0, as ids, and leave those up to `after` out."""
        self._form.after = after

    async def send_event(self, content: object) -> None:
        """Send one event, or those that a dialect has for it."""
        await self._send_events(self._form.events(content))

    async def _send_events(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def send_event_nowait(self, content: object) -> Awaitable[None] | None:
        """Send what `send_event` does without a task: this costs less than half.

        Returns:
            None when it is sent; else what is left to be awaited, by a task, before anything else is sent.
        """
        body = self._form.events(content)
        if not body:
            return None
        sending = self._send({"type": "http.response.body", "body": body, "more_body": True})
        steps = sending.__await__()
        try:
            waited_for = next(steps)
        except StopIteration:
            return None
        return _Rest(waited_for, steps)

    async def end_stream(self) -> None:
        """Send what ends a stream."""
        self._finished = True
        await self._send({"type": "http.response.body", "body": self._form.end})


class _Rest:
    """A coroutine that has begun: what it waits for, and its further steps."""

    def __init__(self, waited_for: Any, steps: Generator[Any, Any, None]) -> None:
        self._waited_for = waited_for
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, None]:
        waited_for = self._waited_for
        while True:
            step: Callable[[Any], Any] = self._steps.send
            try:
                answer = yield waited_for
            except BaseException as error:  # noqa: BLE001 - a cancellation is the coroutine's to handle
                step, answer = self._steps.throw, error
            try:
                waited_for = step(answer)
            except StopIteration:
                return


def _too_large(size: str, limit: int) -> RequestRefused:
    message = limit_message(
        "the request body is too large",
        value=f"{size} bytes",
        limit=f"{limit} bytes",
        remedy="send fewer or smaller images or raise server.body_bytes_max",
    )
    return RequestRefused(message, code="body_too_large", status=413)
