"""One HTTP exchange: the only caller of `receive()`.

ASGI reports a disconnect only to a caller of `receive()`. So one object owns it: first it reads the body within its
limit; then, while the request is processed, it waits for a disconnect and cancels the processing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from vsched.api.errors import ClientDisconnected, envelope
from vsched.errors import RequestFailed, RequestRefused, limit_message
from vsched.media.budget import Grant

logger = logging.getLogger(__name__)

T = TypeVar("T")
Headers = Iterable[tuple[bytes, bytes]]

_ENCODER = msgspec.json.Encoder(enc_hook=str)
"""Values that JSON cannot represent, such as some statistics, become text."""
_SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
ROOMLESS_BYTES = 64 * 1024
"""Bodies up to this size need no reserved memory: the buffer of a connection is as large."""


class HttpExchange:
    """A request being read and a response being written, in the API format of its path.

    Attributes:
        started: True if the response has started.
        body: The received body, while it has to be saved; empty otherwise.
        headers: Further headers of the response, whatever it is.
        status: Status of the response; 0 before it.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.started = False
        self.body = b""
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.status = 0
        self._form = form_of(scope)
        self._receive = receive
        self._send = send
        self._body_read = False
        self._room: Grant | None = None
        self._finished = False

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header, by its lower-case name."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    async def read_body(self, limit: int, room: Callable[[int], Awaitable[Grant]]) -> list[bytes]:
        """Read the body in pieces, at most `limit` bytes, and reserve memory for a large one with `room`.

        Raises:
            RequestRefused: With status 413, before reading if the length was announced; or raised by `room`.
            ClientDisconnected: If the client disconnected before it was complete.
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
        """Release the reserved memory, once the body is no longer held; idempotent."""
        if self._room is not None:
            self._room.release()

    async def until_disconnect(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` and return its result, cancelling it if the client disconnects.

        Raises:
            ClientDisconnected: After a disconnect, when `work` has ended.
        """
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch())
                result = await work
                watcher.cancel()
        except BaseExceptionGroup as group_error:
            # Frames in tracebacks refer to errors, and to the request: cycles that would keep its images.
            group_error.__traceback__ = group_error.__context__ = None
            # An error of the work is more specific than a disconnect at the same time.
            error = min(group_error.exceptions, key=lambda one: isinstance(one, ClientDisconnected))
        else:
            return result
        try:
            raise error
        finally:
            del error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # Servers also send this message after a complete response.
        if not self._finished:
            raise ClientDisconnected

    async def serve_response(self, work: Awaitable[None]) -> None:
        """Let `work` send its response; send its error, if any, and nothing if the client has disconnected."""
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
        """Send a complete JSON response."""
        await self.send_bytes(
            _ENCODER.encode(content),
            content_type=b"application/json",
            status=status,
            headers=headers,
        )

    async def send_bytes(
        self, body: bytes, *, content_type: bytes, status: int = 200, headers: Headers = ()
    ) -> None:
        """Send a complete response."""
        fixed = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        await self._start_response(status, [*fixed, *headers])
        self._finished = True
        await self._send({"type": "http.response.body", "body": body})

    async def send_error(self, error: RequestRefused | RequestFailed) -> None:
        """Send an error with its status; in a stream that has started, as its last event."""
        if self.started:
            self._form.after = None  # never skipped: no reader has received it yet
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
            # The rest of the body is not read, so the connection cannot be reused.
            headers.append((b"connection", b"close"))
        await self.send_json(
            self._form.error(error), status=self._form.status(error), headers=headers
        )

    def _target(self) -> bytes:
        """Path and query of the request, as they were sent."""
        query: bytes = self.scope.get("query_string", b"")
        path: bytes = self.scope.get("raw_path") or self.scope["path"].encode()
        return path + (b"?" + query if query else b"")

    async def start_stream(self, headers: Headers = ()) -> None:
        """Start a stream of server-sent events."""
        await self._start_response(200, [*_SSE_HEADERS, *headers])

    async def _start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        self.status = status
        headers += self.headers
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    @property
    def numbers_events(self) -> bool:
        """True if the events of a stream are numbered."""
        return self._form.after is not None

    def number_events(self, *, after: int = -1) -> None:
        """Number the events of a stream from 0, as their ids, and skip those up to `after`."""
        self._form.after = after

    async def send_event(self, content: object) -> None:
        """Send one event, or the events that another vendor's API has for it."""
        await self._send_events(self._form.events(content))

    async def _send_events(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def send_event_nowait(self, content: object) -> Awaitable[None] | None:
        """Send an event without a task, at less than half the cost of `send_event`.

        Returns:
            None once it is sent; otherwise an awaitable for the rest, which must be awaited in a task before other
                sends.
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
        """Send the end of a stream."""
        self._finished = True
        await self._send({"type": "http.response.body", "body": self._form.end})


class _Rest:
    """A started coroutine: the object that it waits for, and its remaining steps."""

    def __init__(self, waited_for: Any, steps: Generator[Any, Any, None]) -> None:
        self._waited_for = waited_for
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, None]:
        waited_for = self._waited_for
        while True:
            step: Callable[[Any], Any] = self._steps.send
            try:
                answer = yield waited_for
            except BaseException as error:  # noqa: BLE001 - the coroutine handles cancellation
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


class WireForm:
    """OpenAI's format; one instance for each exchange.

    Attributes:
        end: End of a stream.
        after: Events have ids, numbered from 0, and events up to this one are skipped; None for no ids.
    """

    end = b"data: [DONE]\n\n"
    after: int | None = None

    def __init__(self) -> None:
        self._number = 0

    def status(self, error: RequestRefused | RequestFailed) -> int:
        """HTTP status of an error."""
        return error.status

    def error(self, error: RequestRefused | RequestFailed) -> object:
        """Body of an error."""
        return envelope(error)

    def error_events(self, error: RequestRefused | RequestFailed) -> bytes:
        """Encode an error within a stream."""
        return self.events(self.error(error))

    def events(self, content: object) -> bytes:
        """Encode a formatter's output as server-sent events; None yields no event."""
        if content is None:
            return b""
        return self._numbered(b"data: " + _ENCODER.encode(content) + b"\n\n")

    def _numbered(self, event: bytes) -> bytes:
        number = self._number
        self._number += 1
        if self.after is None:
            return event
        return b"id: %d\n%b" % (number, event) if number > self.after else b""


class StreamEvent(msgspec.Struct, kw_only=True):
    """An event that is named by its type."""

    type: str


class NamedEvents(WireForm):
    """Sequences of named events, without an end marker."""

    end = b""

    def events(self, content: object) -> bytes:
        assert isinstance(content, Sequence)
        return b"".join(map(self._event, content))

    def _event(self, event: StreamEvent) -> bytes:
        name, data = event.type.encode(), _ENCODER.encode(event)
        return self._numbered(b"event: %b\ndata: %b\n\n" % (name, data))


class MessagesErrorBody(msgspec.Struct):
    """Body of an Anthropic error."""

    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class MessagesError(StreamEvent, kw_only=True):
    """Envelope of an Anthropic error, as a body and as an event."""

    type: str = "error"
    error: MessagesErrorBody


_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_MESSAGES_DETAILS = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
}
"""Error details by refused parameter: they make Anthropic's SDK repeat the request with the whole history."""


class MessagesForm(NamedEvents):
    """Anthropic's format."""

    def status(self, error: RequestRefused | RequestFailed) -> int:
        return 529 if error.status == 503 else error.status

    def error(self, error: RequestRefused | RequestFailed) -> MessagesError:
        default = "invalid_request_error" if error.status < 500 else "api_error"
        kind = _MESSAGES_TYPES.get(error.status, default)
        body = envelope(error).error
        if body.code == "context_length_exceeded":
            # Claude Code compacts its history at these words.
            body.message = f"prompt is too long: {error.message}"
        details = _MESSAGES_DETAILS.get(body.param or "", UNSET)
        return MessagesError(error=MessagesErrorBody(kind, body.message, details))

    def error_events(self, error: RequestRefused | RequestFailed) -> bytes:
        return self._event(self.error(error))


class NumberedEvent(StreamEvent, kw_only=True):
    """An event with its number in the stream, which is set when it is written."""

    sequence_number: int = 0


class ResponsesErrorEvent(NumberedEvent, kw_only=True):
    """An error within a stream of /v1/responses."""

    type: str = "error"
    code: str | None
    message: str
    param: str | None


class ResponsesForm(NamedEvents):
    """Format of OpenAI's Responses API: OpenAI's errors, and events with names and numbers."""

    _created: Any = None

    def error_events(self, error: RequestRefused | RequestFailed) -> bytes:
        found = envelope(error).error
        event = ResponsesErrorEvent(code=found.code, message=found.message, param=found.param)
        if self._created is None:
            return self.events([event])
        reason = {"code": found.code, "message": found.message}
        response = replace(self._created.response, status="failed", error=reason)
        return self.events(
            [event, replace(self._created, type="response.failed", response=response)]
        )

    def _event(self, event: StreamEvent) -> bytes:
        assert isinstance(event, NumberedEvent)
        if not self._number:
            self._created = event
        event.sequence_number = self._number
        return super()._event(event)


_FORMS: dict[str, type[WireForm]] = {
    "messages": MessagesForm,
    "responses": ResponsesForm,
}
"""Formats by the path component after /v1."""


def form_of(scope: Scope) -> WireForm:
    """Format for the client of a request: by its path, for `/v1/models` by its headers."""
    parts = scope.get("path", "").split("/")
    api = parts[2] if parts[:2] == ["", "v1"] and parts[2:] else ""
    if api == "models" and is_anthropic_client(scope["headers"]):
        return MessagesForm()
    return _FORMS.get(api, WireForm)()


def is_anthropic_client(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True for a client of Anthropic's API, which shares paths with OpenAI's."""
    return any(name == b"anthropic-version" for name, _ in headers)
