"""Read request bodies within a memory limit over all connections, and decode them.

Bodies with images are large, and a thousand connections could send one each. So a body that exceeds the connection's
own buffer waits for memory before it is read, and keeps that memory until its request is prepared.

Decoding holds the GIL: 10 ms for 30 MB of base64, but two seconds and a gigabyte for 30 MB of empty lists. So the
values of a large body are counted first, slice by slice, within the processor's cache. Large bodies are decoded in a
thread, one at a time: if several threads took turns with the GIL, the event loop would wait for all of them.

Rejected: a smaller `server.body_bytes_max`, since images need it; a streaming JSON decoder, which is slower for every
request.
"""

from __future__ import annotations

import asyncio
import codecs
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.api import parameters
from vsched.api.contract import ApiSettings
from vsched.api.errors import ParameterRefused
from vsched.api.http_exchange import HttpExchange
from vsched.errors import RequestRefused, limit_message
from vsched.media.budget import ByteBudget, Grant

Body = TypeVar("Body")

SMALL_BYTES = 256 * 1024
"""Bodies up to this size are decoded without further checks, because that is always fast."""
VALUES_MAX = 128 * 1024
"""Limit of JSON values, in addition to one for each token of the context."""
ESCAPES_MAX = 1024 * 1024
"""Limit of backslashes, in addition to sixteen per token of the context: escapes are slow to decode."""
_THREAD_BYTES = 1024 * 1024
"""Bodies up to this size are decoded on the event loop: that is faster than a switch to a thread."""
_RETRY_AFTER_S = 5
_SLICE_BYTES = 64 * 1024
_MARKS = (ord(","), ord("["), ord("{"))


class RequestBodies:
    """Reads bodies; the budget covers those being read or decoded, and those of requests in preparation."""

    def __init__(self, settings: ApiSettings, *, keeps: bool = False) -> None:
        """Use the limits of `settings`; with `keeps`, the exchange keeps its body after reading."""
        self._keeps = keeps
        self._body_bytes_max = settings.body_bytes_max
        self._bytes_max = settings.bodies_bytes_max
        self._wait_s = settings.body_wait_s
        self._strict = settings.strict_fields
        self._budget = ByteBudget(settings.bodies_bytes_max)
        self._turn = asyncio.Lock()

    async def read_body(self, exchange: HttpExchange, kind: type[Body], *, tokens: int) -> Body:
        """Read and decode a body, with a limit of values that depends on `tokens`.

        The exchange holds the memory of a large body until `release_room`.

        Blocks: up to `body_wait_s` for memory, then until the client has sent it, which the connection limits.

        Raises:
            RequestRefused: If it is too large or invalid, or there is no memory for it.
            ClientDisconnected: If the client disconnected before it was complete.
        """
        pieces = await exchange.read_body(self._body_bytes_max, self._room)
        if sum(map(len, pieces)) <= _THREAD_BYTES:
            return self._read(exchange, pieces, kind, tokens)
        async with self._turn:
            return await asyncio.to_thread(self._read, exchange, pieces, kind, tokens)

    def _read(
        self, exchange: HttpExchange, pieces: list[bytes], kind: type[Body], tokens: int
    ) -> Body:
        if self._keeps:
            pieces[:] = [b"".join(pieces)]
            exchange.body = pieces[0]
        return read_request(pieces, kind, tokens, strict=self._strict)

    async def _room(self, size: int) -> Grant:
        """Reserve memory for a body, at most the whole budget.

        Order: first come, first served.

        Raises:
            RequestRefused: With status 503, if there is none in time.
        """
        size = min(size, self._bytes_max)  # a single body is limited by its own limit
        granted = asyncio.Event()
        grant = self._budget.ask(size, lambda _: granted.set())
        try:
            async with asyncio.timeout(self._wait_s):
                await granted.wait()
        except TimeoutError:
            grant.release()
            message = limit_message(
                "the requests being read hold too many bytes",
                value=f"no room for {size} bytes in {self._wait_s:g} s",
                limit=f"{self._bytes_max} bytes",
                remedy="try again later or raise server.bodies_bytes_max",
            )
            raise RequestRefused(
                message, code="bodies_full", status=503, retry_after_s=_RETRY_AFTER_S
            ) from None
        except BaseException:
            grant.release()
            raise
        return grant


def read_request(
    pieces: list[bytes], kind: type[Body], tokens: int, *, strict: bool = False
) -> Body:
    """Decode a body that arrived in pieces, with a limit of values that depends on `tokens`.

    `strict` refuses unknown fields at every level.

    Blocks: for milliseconds per megabyte; call it off the event loop for large ones.

    Raises:
        RequestRefused: If it would take too long to decode, or is invalid.
    """
    # Joining large pieces releases the GIL. The pieces are dropped with it, so there are at most two copies.
    body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    pieces.clear()
    body = body.removeprefix(codecs.BOM_UTF8)  # RFC 8259 allows parsers to ignore it
    if len(body) > SMALL_BYTES:
        check_json_values(body, tokens)
    request = parameters.decode_body(body, kind)
    if strict:
        refuse_unknown(body, request)
    return request


def check_json_values(body: bytes, context_tokens: int) -> None:
    """Reject a body that would take long to decode.

    Raises:
        RequestRefused: With status 413.
    """
    values_max, escapes_max = VALUES_MAX + context_tokens, ESCAPES_MAX + 16 * context_tokens
    # Nearly every body passes these cheap counts, which include characters within strings.
    marks = escapes = 0
    characters = np.frombuffer(body, np.uint8)
    for start in range(0, len(body), _SLICE_BYTES):
        piece = characters[start : start + _SLICE_BYTES]
        marks += sum(int(np.count_nonzero(piece == mark)) for mark in _MARKS)
        escapes += int(np.count_nonzero(piece == ord("\\")))
    if marks > values_max and count_values(body, values_max) > values_max:
        raise _refusal("JSON values", values_max, "send fewer messages, content parts or tokens")
    if escapes > escapes_max:
        remedy = "shorten the text, or send its characters unescaped"
        raise _refusal("backslashes", escapes_max, remedy)


def _refusal(what: str, limit: int, remedy: str) -> RequestRefused:
    message = limit_message(
        f"the request body has too many {what}", value=f"over {limit}", limit=limit, remedy=remedy
    )
    return RequestRefused(message, code="too_many_values", status=413)


def count_values(body: bytes, limit: int) -> int:
    """Count the commas, brackets and braces outside strings; may stop early above `limit`."""
    count = 0
    in_string = 0
    escape = b""
    for start in range(0, len(body), _SLICE_BYTES):
        piece = escape + body[start : start + _SLICE_BYTES]
        # An unescaped backslash at the end belongs to the next slice.
        run = len(piece) - len(piece.rstrip(b"\\"))
        escape = b"\\" * (run % 2)
        piece = piece[: len(piece) - len(escape)]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        characters = np.frombuffer(piece, np.uint8)
        quotes = (characters == ord('"')).view(np.uint8)
        inside = np.bitwise_xor.accumulate(quotes) ^ in_string
        count += int(np.count_nonzero(_marks(characters) & (inside == 0)))
        if count > limit:
            break
        in_string ^= int(np.count_nonzero(quotes)) & 1
    return count


def _marks(characters: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = characters == _MARKS[0]
    for mark in _MARKS[1:]:
        found |= characters == mark
    return found


_PATH_CHARACTERS_MAX = 100


def refuse_unknown(body: bytes, request: object) -> None:
    """Reject a body with more fields than the request that was decoded from it.

    Raises:
        ParameterRefused: With the path of the first such field.
    """
    try:
        path = _unknown(msgspec.json.decode(body), msgspec.to_builtins(request), "")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        # Unknown fields were not parsed before.
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
