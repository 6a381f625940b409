"""Read request bodies within a memory limit over all connections, and decode them.

Bodies with images are large, and a thousand connections could send one each. So a body that exceeds the connection's
own buffer waits for memory before it is read, and keeps that memory until its request is prepared.

Decoding holds the GIL. Its cost grows with the number of values (30 MB of empty lists take two seconds and a gigabyte)
and with the texts (30 MB take 25 ms, and 100 ms if other processes compete for the cores). So images are cut out of a
large body first, the rest is limited, and its values are counted slice by slice, within the processor's cache. Large
bodies are decoded in a thread, one at a time: if several threads took turns with the GIL, the event loop would wait for
all of them.

Rejected: a smaller `server.body_bytes_max`, since images need it; a streaming JSON decoder, which is slower for every
request.

Base64 images are cut out of a body before JSON decoding, and put back into the decoded request.

JSON decoding copies each text under the GIL, 25 ms for 30 MB, and several times as long if other processes compete for
the cores: the event loop stands still meanwhile. Finding the ends of a text takes 3 ms, in steps, and it is copied
without the GIL. Whether it is valid base64 is checked later, when it is decoded.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.api import parameters
from vsched.api.contract import ApiSettings
from vsched.api.errors import ParameterRefused
from vsched.api.http_exchange import HttpExchange
from vsched.api.request_schema import (
    FramesPart,
    ImageEmbedsPart,
    ImagePart,
    ImageUrl,
    VideoEmbedsPart,
    VideoPart,
    VideoUrl,
)
from vsched.errors import RequestRefused, limit_message
from vsched.media.base64_text import TextWithBase64
from vsched.media.budget import BudgetStatistics, ByteBudget, Grant

LONG_BYTES = 8 * 1024
_PIECE_BYTES = 256 * 1024
_BEGIN = re.compile(rb"(?:[ ]|\\[nrt])*data:[^,]{0,4096},|(?=[A-Za-z0-9+/\\]{64})", re.IGNORECASE)
_ESCAPES = (
    (rb"\/", b"/"),  # written by PHP
    *((rb"\n", b"\n"), (rb"\r", b"\r"), (rb"\t", b"\t"), (rb"\f", b"\f")),
    *((rb"\u002B", b"+"), (rb"\u002b", b"+"), (rb"\u002F", b"/"), (rb"\u002f", b"/")),  # .NET
    *((rb"\u003d", b"="), (rb"\u003D", b"=")),  # Gson
)
"""JSON escapes of base64 characters and of line breaks."""
_ESCAPE_BYTES_MAX = 6


@runtime_checkable
class HasImageFields(Protocol):
    """A request that can list its image fields."""

    def image_fields(self) -> Iterator[tuple[msgspec.Struct, str]]:
        """Yield each struct that holds an image, and the name of its base64 field."""
        ...


class ReducedBody(NamedTuple):
    """A body without its long base64.

    Attributes:
        body: The body with placeholders, which no client can guess.
        base64: Base64 by placeholder.
        places: Number of placeholders in the body.
    """

    body: bytes
    base64: dict[str, bytes]
    places: int


def extract_base64(body: bytes) -> ReducedBody:
    """Replace every base64 text of `LONG_BYTES` or more in a body by a placeholder."""
    parts: list[bytes] = []
    taken: dict[str, bytes] = {}
    done = places = 0
    for start, end in _long_texts(body):
        # Outside of strings, punctuation follows a quotation mark: so this is a string, or the body is not valid JSON.
        begin = _BEGIN.match(body, start, end)
        base64 = _unescaped(body, begin.end(), end) if begin is not None else None
        if begin is None or base64 is None:
            continue
        name = next((name for name, other in taken.items() if other == base64), "")
        if not name:
            name = f"({len(base64)} characters of base64, {secrets.token_hex(16)})"
            taken[name] = base64
        parts += [body[done : begin.end()], name.encode()]
        done = end
        places += 1
    return ReducedBody(b"".join([*parts, body[done:]]) if parts else body, taken, places)


def _long_texts(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield the spans between quotation marks that are long; the number of searches is at most size / `LONG_BYTES`."""
    at = 0
    while (end := _find(body, b'"', at + LONG_BYTES)) >= 0:
        start = body.rfind(b'"', at, end) + 1
        if end - start >= LONG_BYTES:
            yield start, end
        at = end


def _find(body: bytes, character: bytes, start: int) -> int:
    """Find the next occurrence of a character, or -1; in steps, between which the GIL can be released."""
    for at in range(start, len(body), _PIECE_BYTES):
        if (place := body.find(character, at, at + _PIECE_BYTES)) >= 0:
            return place
    return -1


def _unescaped(body: bytes, start: int, end: int) -> bytes | None:
    """Part of a body without its escapes; None if it has escapes not in `_ESCAPES`, or raw line breaks."""
    # Joining a buffer of this size releases the GIL, slicing does not.
    part = b"".join([memoryview(body)[start:end]])
    if any(_find(part, each, 0) >= 0 for each in (b"\n", b"\r", b"\t", b"\f")):
        return None  # not valid JSON
    if _find(part, b"\\", 0) < 0:
        return part
    pieces: list[bytes] = []
    at = 0
    while at < len(part):
        stop = at + _PIECE_BYTES
        last = part.rfind(b"\\", max(stop - _ESCAPE_BYTES_MAX + 1, at), stop)
        if last >= 0:  # do not split an escape
            stop = max(stop, last + (_ESCAPE_BYTES_MAX if part[last + 1 : last + 2] == b"u" else 2))
        piece = part[at:stop]
        for escaped, character in _ESCAPES:
            piece = piece.replace(escaped, character)
        if b"\\" in piece:
            return None
        pieces.append(piece)
        at = stop
    return b"".join(pieces)


def restore_base64(request: Any, reduced: ReducedBody) -> bool:
    """Put the base64 back into the image fields of a request; return False if some of it belongs elsewhere."""
    places = 0
    for holder, field in _image_fields(request):
        text = getattr(holder, field) or ""
        start = max(text.rfind("("), 0)
        if (base64 := reduced.base64.get(text[start:])) is not None:
            setattr(holder, field, TextWithBase64.of(text, start, base64))
            places += 1
    return places == reduced.places


class _Entry:
    """An entry of a list, as an attribute."""

    def __init__(self, entries: list[str], index: int) -> None:
        self._entries, self._index = entries, index

    @property
    def text(self) -> str:
        return self._entries[self._index]

    @text.setter
    def text(self, value: str) -> None:
        self._entries[self._index] = value


def _image_fields(request: Any) -> Iterator[tuple[Any, str]]:
    """Yield each struct that holds an image, and the name of its base64 field."""
    if isinstance(request, HasImageFields):
        yield from request.image_fields()
        return
    for message in getattr(request, "messages", None) or ():
        for part in message.content if isinstance(message.content, list) else ():
            yield from base64_fields(part)


def base64_fields(part: Any) -> Iterator[tuple[Any, str]]:
    """Yield each struct of a content part that holds an image or video, and the name of its base64 field."""
    if isinstance(part, ImageEmbedsPart | VideoEmbedsPart):
        file = part.image_embeds if isinstance(part, ImageEmbedsPart) else part.video_embeds
        yield from ((file, "data"), (file, "url"))
    elif isinstance(part, ImagePart) and isinstance(part.image_url, ImageUrl):
        yield part.image_url, "url"
    elif isinstance(part, ImagePart):
        yield part, "image_url"
    elif isinstance(part, VideoPart) and isinstance(part.video_url, VideoUrl):
        yield part.video_url, "url"
    elif isinstance(part, VideoPart):
        yield part, "video_url"
    elif isinstance(part, FramesPart):
        if isinstance(part.video, str):
            yield part, "video"
            return
        for index in range(len(part.video)):
            yield _Entry(part.video, index), "text"


Body = TypeVar("Body")

SMALL_BYTES = 256 * 1024
"""Bodies up to this size are decoded without further checks, because that is always fast."""
VALUES_MAX = 128 * 1024
"""Limit of JSON values, in addition to one for each token of the context."""
TEXT_BYTES_MAX = 4 * 1024 * 1024
TOKEN_BYTES = 16
"""Bytes per token of the context that a body may have without images, in addition to `TEXT_BYTES_MAX`."""
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

    def statistics(self) -> BudgetStatistics:
        """Return a snapshot."""
        return self._budget.statistics()

    async def read(self, exchange: HttpExchange, kind: type[Body], *, tokens: int) -> Body:
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
    if len(body) <= SMALL_BYTES:
        return _decoded(body, kind, strict=strict)
    reduced = extract_base64(body)
    check_texts(reduced.body, tokens)
    check_json_values(reduced.body, tokens)
    request = _decoded(reduced.body, kind, strict=strict)
    if restore_base64(request, reduced):
        return request
    # The long base64 is not in an image field: decode it as ordinary text.
    check_texts(body, tokens)
    check_json_values(body, tokens)
    return _decoded(body, kind, strict=strict)


def _decoded(body: bytes, kind: type[Body], *, strict: bool) -> Body:
    request = parameters.decode_body(body, kind)
    if strict:
        refuse_unknown(body, request)
    return request


def text_bytes_max(context_tokens: int) -> int:
    """Maximum size of a body without images: larger than any prompt that fits."""
    return TEXT_BYTES_MAX + TOKEN_BYTES * context_tokens


def check_texts(body: bytes, context_tokens: int) -> None:
    """Reject a body whose texts are too long to fit into the context.

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
