"""Base64 images are cut out of a body before JSON decoding, and put back into the decoded request.

JSON decoding copies each text under the GIL, 25 ms for 30 MB, and several times as long if other processes compete for
the cores: the event loop stands still meanwhile. Finding the ends of a text takes 3 ms, in steps, and it is copied
without the GIL. Whether it is valid base64 is checked later, when it is decoded.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from vsched.api.request_schema import (
    FramesPart,
    ImageEmbedsPart,
    ImagePart,
    ImageUrl,
    VideoEmbedsPart,
    VideoPart,
)
from vsched.media.base64_text import TextWithBase64

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
    elif isinstance(part, VideoPart) and isinstance(part.video_url, ImageUrl):
        yield part.video_url, "url"
    elif isinstance(part, VideoPart):
        yield part, "video_url"
    elif isinstance(part, FramesPart):
        if isinstance(part.video, str):
            yield part, "video"
            return
        for index in range(len(part.video)):
            yield _Entry(part.video, index), "text"
