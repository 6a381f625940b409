"""The bodies of all connections: what they take together, and how one becomes a request.

Bodies that images need are large, and a thousand connections could bring one each. So a body that does not fit into
the connection's own buffer waits for room until it is read, and keeps it until its request is prepared.

Decoding holds the GIL. A body is expensive by the number of its values (30 MB of empty lists take two seconds and a
gigabyte) and by its texts (30 MB take 25 ms, and 100 where other processes want the processor). So images are taken out
of a large body before, what is left of it has a limit, and its values are counted slice by slice, which stays in the
processor's cache. Large bodies are read in a thread, one after the other: if several held the GIL in turns, the event
loop would wait for all of them.
"""

from __future__ import annotations

import asyncio
import codecs
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from vsched.api import parameters
from vsched.api.bodies.long_base64 import put_beside, take_base64
from vsched.api.bodies.strict_fields import refuse_unknown
from vsched.api.contract import ApiSettings
from vsched.api.http_exchange import HttpExchange
from vsched.errors import RequestRefused, limit_message
from vsched.media.budget import BudgetStatistics, ByteBudget, Grant

Body = TypeVar("Body")

SMALL_BYTES = 256 * 1024
"""A body up to this size is decoded as it is: it cannot take long."""
VALUES_MAX = 128 * 1024
"""Beyond the tokens of the context, each of which can be a value of a prompt."""
TEXT_BYTES_MAX = 4 * 1024 * 1024
TOKEN_BYTES = 16
"""For each token of the context, beyond `TEXT_BYTES_MAX`, a body may have so many bytes besides images."""
ESCAPES_MAX = 1024 * 1024
"""Backslashes of a body, beyond sixteen for each token of the context: what has them takes long to decode, too."""
_THREAD_BYTES = 1024 * 1024
"""A body up to this size is read on the loop: that takes less than going to a thread."""
_RETRY_AFTER_S = 5
_SLICE_BYTES = 64 * 1024
_MARKS = (ord(","), ord("["), ord("{"))


class RequestBodies:
    """The bodies that are being read and decoded, and those of requests that are being prepared."""

    def __init__(self, settings: ApiSettings, *, keeps: bool = False) -> None:
        """Read within the limits; with `keeps`, an exchange has its body once it is read."""
        self._keeps = keeps
        self._body_bytes_max = settings.body_bytes_max
        self._bytes_max = settings.bodies_bytes_max
        self._wait_s = settings.body_wait_s
        self._strict = settings.strict_fields
        self._budget = ByteBudget(settings.bodies_bytes_max)
        self._turn = asyncio.Lock()

    def statistics(self) -> BudgetStatistics:
        """Return a snapshot."""
        return self._budget.statistics()

    async def read(self, exchange: HttpExchange, kind: type[Body], *, tokens: int) -> Body:
        """Return a body as a request, which may hold as many values as `tokens` need.

        The exchange holds the room of a large one until `release_room`.

        Blocks: up to `body_wait_s` for room, then until the client has sent it, which the connection bounds.

        Raises:
            RequestRefused: When it is too large, no such request, or there is no room.
            ClientDisconnected: When the client left before it was complete.
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
        """Return room for a body, the largest there can be if need be.

        Order: first come, first served.

        Raises:
            RequestRefused: With status 503, when there is none in time.
        """
        size = min(size, self._bytes_max)  # one that is alone is bounded by its own limit
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
    """Return the body that came in these pieces as a request, which may hold as many values as `tokens` need.

    `strict` refuses what nobody knows wherever it is.

    Blocks: for milliseconds a megabyte; call it off the event loop for large ones.

    Raises:
        RequestRefused: When it would take too long, or is no such request.
    """
    # The join of large ones releases the GIL. The pieces end with it: two copies are the most that there are.
    body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    pieces.clear()
    body = body.removeprefix(codecs.BOM_UTF8)  # RFC 8259 allows parsers to ignore it
    if len(body) <= SMALL_BYTES:
        return _decoded(body, kind, strict=strict)
    reduced = take_base64(body)
    check_texts(reduced.body, tokens)
    check_json_values(reduced.body, tokens)
    request = _decoded(reduced.body, kind, strict=strict)
    if put_beside(request, reduced):
        return request
    # It is long base64 in another place: a text as others.
    check_texts(body, tokens)
    check_json_values(body, tokens)
    return _decoded(body, kind, strict=strict)


def _decoded(body: bytes, kind: type[Body], *, strict: bool) -> Body:
    request = parameters.decode_body(body, kind)
    if strict:
        refuse_unknown(body, request)
    return request


def text_bytes_max(context_tokens: int) -> int:
    """Return how large a body may be besides images: more than any prompt that fits."""
    return TEXT_BYTES_MAX + TOKEN_BYTES * context_tokens


def check_texts(body: bytes, context_tokens: int) -> None:
    """Refuse what takes long to decode, and cannot fit.

    Raises:
        RequestRefused: With status 413.
    """
    limit = text_bytes_max(context_tokens)
    if len(body) > limit:
        message = limit_message(
            "the request body holds too much besides images",
            value=f"{len(body)} bytes",
            limit=f"{limit} bytes",
            remedy="send a shorter text",
        )
        raise RequestRefused(message, code="text_too_large", status=413)


def check_json_values(body: bytes, context_tokens: int) -> None:
    """Refuse a body whose decoding would take long.

    Raises:
        RequestRefused: With status 413.
    """
    values_max, escapes_max = VALUES_MAX + context_tokens, ESCAPES_MAX + 16 * context_tokens
    # Nearly every body passes the cheap counts, which take what stands in strings for values as well.
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
    """Count the commas, brackets and braces outside strings, at least until there are more than `limit`."""
    count = 0
    in_string = 0
    escape = b""
    for start in range(0, len(body), _SLICE_BYTES):
        piece = escape + body[start : start + _SLICE_BYTES]
        # A backslash that is not itself escaped belongs to the next slice.
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
