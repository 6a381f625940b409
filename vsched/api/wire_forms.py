"""Format of errors and events, chosen by the path of the request; the rest of an exchange is the same for all APIs.

Errors may come from code that is independent of the API, such as the key check, so the format belongs to the exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vsched.api.errors import envelope
from vsched.errors import RequestFailed, RequestRefused

_ENCODER = msgspec.json.Encoder()


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
        self.after = None  # never skipped: no reader has received it yet
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


class StreamEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    """An event whose tag is its name."""


class NamedEvents(WireForm):
    """Sequences of named events, without an end marker."""

    end = b""

    def events(self, content: object) -> bytes:
        assert isinstance(content, Sequence)
        return b"".join(map(self._event, content))

    def _event(self, event: StreamEvent) -> bytes:
        name = str(event.__struct_config__.tag).encode()
        return self._numbered(b"event: %b\ndata: %b\n\n" % (name, _ENCODER.encode(event)))


class MessagesErrorBody(msgspec.Struct):
    """Body of an Anthropic error."""

    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class MessagesError(StreamEvent, tag="error"):
    """Envelope of an Anthropic error, as a body and as an event."""

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
        details = _MESSAGES_DETAILS.get(body.param or "", UNSET)
        return MessagesError(error=MessagesErrorBody(kind, body.message, details))

    def error_events(self, error: RequestRefused | RequestFailed) -> bytes:
        self.after = None
        return self._event(self.error(error))


class NumberedEvent(StreamEvent, kw_only=True):
    """An event with its number in the stream, which is set when it is written."""

    sequence_number: int = 0


class ResponsesErrorEvent(NumberedEvent, tag="error"):
    """An error within a stream of /v1/responses."""

    code: str | None
    message: str
    param: str | None


class ResponsesForm(NamedEvents):
    """Format of OpenAI's Responses API: OpenAI's errors, and events with names and numbers."""

    def error_events(self, error: RequestRefused | RequestFailed) -> bytes:
        self.after = None
        found = envelope(error).error
        event = ResponsesErrorEvent(code=found.code, message=found.message, param=found.param)
        return self.events([event])

    def _event(self, event: StreamEvent) -> bytes:
        assert isinstance(event, NumberedEvent)
        event.sequence_number = self._number
        return super()._event(event)


_FORMS: dict[str, type[WireForm]] = {
    "messages": MessagesForm,
    "responses": ResponsesForm,
}
"""Formats by the path component after /v1."""


def form_of(path: str) -> WireForm:
    """Format for clients of a path."""
    parts = path.split("/")
    found = _FORMS.get(parts[2], WireForm) if parts[:2] == ["", "v1"] and parts[2:] else WireForm
    return found()


def is_anthropic_client(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True for a client of Anthropic's API; needed for paths that both APIs have."""
    return any(name == b"anthropic-version" for name, _ in headers)
