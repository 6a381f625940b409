"""Detection of unknown fields within messages and other nested objects, for strict servers."""

from __future__ import annotations

import msgspec

from vsched.api.errors import ParameterRefused

_PATH_CHARACTERS_MAX = 100


def refuse_unknown(body: bytes, request: object) -> None:
    """Reject a body with more fields than the request that was decoded from it.

    Raises:
        ParameterRefused: With the path of the first such field.
    """
    try:
        path = _unknown(msgspec.json.decode(body), msgspec.to_builtins(request), "")
    except (
        msgspec.MsgspecError,
        UnicodeError,
        RecursionError,
    ):  # unknown fields were not parsed before
        message = "the body is not JSON, or nested too deeply. Remedy: send a flat object in UTF-8."
        raise ParameterRefused(message, param=None, code="invalid_json") from None
    if path:
        name = path[:_PATH_CHARACTERS_MAX]
        message = (
            f"`{name}` is not known, and server.strict_fields is set. "
            "Remedy: check its spelling or leave it out."
        )
        raise ParameterRefused(message, param=name, code="unknown_parameter")


def _unknown(sent: object, known: object, path: str) -> str:
    """Path of the first unknown field; empty if there is none."""
    pairs: list[tuple[object, object, str]] = []
    if isinstance(sent, dict) and isinstance(known, dict):
        for name, value in sent.items():
            where = f"{path}.{name}".removeprefix(".")
            if name not in known:
                return where
            pairs.append((value, known[name], where))
    elif isinstance(sent, list) and isinstance(known, list | tuple):
        pairs = [
            (value, other, f"{path}[{index}]")
            for index, (value, other) in enumerate(zip(sent, known, strict=False))
        ]
    return next(filter(None, (_unknown(*pair) for pair in pairs)), "")
