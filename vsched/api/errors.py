"""Errors in OpenAI's form."""

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
"""Codes that OpenAI has a name of its own for: clients look for it."""
_CONTEXT_WORDS = "This model's maximum context length is exceeded: "
"""What litellm, and what is built on it, takes for a prompt that is too long: it reads the words, not the code."""
_SHOWN_CHARACTERS_MAX = 40


class ClientDisconnected(Exception):
    """The client went away."""


class ParameterRefused(RequestRefused):
    """A refusal that names the parameter it is about."""

    def __init__(
        self, message: str, *, param: str | None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message, code=code, status=status)
        self.param = param


class ErrorBody(msgspec.Struct):
    """The inside of an OpenAI error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    """An OpenAI error as it travels."""

    error: ErrorBody


def envelope(error: RequestRefused | RequestFailed) -> ErrorEnvelope:
    """Word an error for the client."""
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
    """Word a parameter outside its bounds."""
    message = limit_message(f"`{param}` is out of bounds", value=value, limit=limit, remedy=remedy)
    return ParameterRefused(message, param=param)


def shown(value: object) -> str:
    """Return a value of a request as JSON, as far as it is short."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS_MAX:
        return f"a text of {len(value)} characters"
    return msgspec.json.encode(value).decode()[:_SHOWN_CHARACTERS_MAX]


def unsupported(param: str, *, remedy: str) -> ParameterRefused:
    """Word a parameter that would change what the request means and that vsched does not support."""
    message = f"`{param}` is not supported. Remedy: {remedy}."
    return ParameterRefused(message, param=param, code="unsupported_parameter")
