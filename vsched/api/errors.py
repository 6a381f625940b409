"""Errors in OpenAI's format."""

from __future__ import annotations

import msgspec

from vsched.errors import RequestFailed, RequestRefused, limit_message

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


_OPENAI_CODES = {
    "context_exceeded": "context_length_exceeded",
    "kv_exceeded": "context_length_exceeded",
    "queue_full": "rate_limit_exceeded",
    "shed": "rate_limit_exceeded",
}
"""Codes that OpenAI names differently: clients check for them."""
_CONTEXT_WORDS = "This model's maximum context length is exceeded: "
"""litellm, and libraries on top of it, detect a prompt that is too long by these words, not by the code."""
_SHOWN_CHARACTERS_MAX = 40


class ClientDisconnected(Exception):
    """The client disconnected."""


class ParameterRefused(RequestRefused):
    """A refusal that names the offending parameter."""

    def __init__(
        self, message: str, *, param: str | None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message, code=code, status=status)
        self.param = param


SentError = tuple[str, dict[str, str | int | None]]
"""An error of a request in a message between processes: its class and its fields."""


def sent_error(error: RequestRefused | RequestFailed) -> SentError:
    """Convert an error for a message."""
    # Other processes do not know subclasses such as `ServerLostError`.
    kind = RequestFailed.__name__ if isinstance(error, RequestFailed) else type(error).__name__
    return kind, dict(vars(error))


def received_error(sent: SentError) -> RequestRefused | RequestFailed:
    """Return the error of a message."""
    name, fields = sent
    error: RequestRefused | RequestFailed
    if name == RequestFailed.__name__:
        error = RequestFailed("")
    elif name == ParameterRefused.__name__:
        error = ParameterRefused("", param=None)
    else:
        error = RequestRefused("", code="")
    error.args = (fields["message"],)
    vars(error).update(fields)
    return error


class ErrorBody(msgspec.Struct):
    """Body of an OpenAI error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    """Envelope of an OpenAI error."""

    error: ErrorBody


def envelope(error: RequestRefused | RequestFailed) -> ErrorEnvelope:
    """Format an error for the client."""
    default = "invalid_request_error" if error.status < 500 else "server_error"
    code = _OPENAI_CODES.get(error.code, error.code)
    before = _CONTEXT_WORDS if code == "context_length_exceeded" else ""
    return ErrorEnvelope(
        ErrorBody(
            message=before + error.message,
            type=_TYPES.get(error.status, default),
            param=getattr(error, "param", None),
            code=code,
        )
    )


def out_of_bounds(param: str, *, value: object, limit: object, remedy: str) -> ParameterRefused:
    """Error for a parameter outside its bounds."""
    message = limit_message(f"`{param}` is out of bounds", value=value, limit=limit, remedy=remedy)
    return ParameterRefused(message, param=param)


def check_count(param: str, count: int, limit: int, unit: str) -> None:
    """Refuse a parameter with more than `limit` elements.

    Raises:
        ParameterRefused: With both numbers, in this unit.
    """
    if count > limit:
        value, limited = f"{count} {unit}", f"{limit} {unit}"
        raise out_of_bounds(param, value=value, limit=limited, remedy="send fewer")


def shown(value: object) -> str:
    """Format a request value as JSON, shortened if it is long."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS_MAX:
        return f"a text of {len(value)} characters"
    return msgspec.json.encode(value).decode()[:_SHOWN_CHARACTERS_MAX]


def unsupported(param: str, *, remedy: str) -> ParameterRefused:
    """Error for a parameter that would change the meaning of the request and is not supported."""
    message = f"`{param}` is not supported. Remedy: {remedy}."
    return ParameterRefused(message, param=param, code="unsupported_parameter")
