"""Base64 within a text, or stored separately if it is long."""

from __future__ import annotations

import io
from collections.abc import Iterable

import pybase64

_PIECE_BYTES = 1024 * 1024
"""Bytes decoded at a time, with the GIL held: 0.2 ms, a tenth of the standard library's time."""
_WHITESPACE = b"\t\n\f\r "


class TextWithBase64(str):
    """A text that ends with base64, stored separately as bytes and represented in the text by a substitute.

    A text of megabytes would be copied under the GIL whenever it is created, hashed or sliced. Equal substitutes mean
    equal base64.
    """

    __slots__ = ("base64", "start")
    base64: bytes
    start: int

    @classmethod
    def of(cls, text: str, start: int, base64: bytes) -> TextWithBase64:
        """Create a text whose end, from `start` on, is the substitute of this base64."""
        made = cls(text)
        made.start, made.base64 = start, base64
        return made


def base64_of(text: str, start: int) -> bytes:
    """The base64 of a text from `start` on.

    Raises:
        ValueError: If it has characters that are not ASCII.
    """
    if isinstance(text, TextWithBase64) and text.start == start:
        return text.base64
    return text[start:].encode("ascii")


def base64_bytes(text: str, start: int = 0) -> int:
    """Number of base64 bytes in a text from `start` on."""
    if isinstance(text, TextWithBase64):
        return len(text.base64)
    return max(len(text) - start, 0)


def decode_base64(base64: bytes) -> bytes:
    """Decode base64 in pieces, so that the event loop can run in between.

    It may contain whitespace and lack padding.

    Raises:
        ValueError: If it is invalid, empty or wrongly padded.
    """
    pieces = [base64[at : at + _PIECE_BYTES] for at in range(0, len(base64), _PIECE_BYTES)]
    try:
        return _decode_pieces(pieces)
    except ValueError:
        return _decode_pieces(piece.translate(None, _WHITESPACE) for piece in pieces)


def _decode_pieces(pieces: Iterable[bytes]) -> bytes:
    content = io.BytesIO()
    size = 0
    rest = b""
    for piece in pieces:
        size += len(piece)
        rest += piece
        whole = max(len(rest) - 1, 0) // 4 * 4  # the last four characters may be padded
        content.write(pybase64.b64decode(rest[:whole], validate=True))
        rest = rest[whole:]
    if b"=" not in rest:
        rest += b"=" * (-size % 4)
    content.write(pybase64.b64decode(rest, validate=True))
    # Padding in the middle of a piece makes its output too short.
    if not size or content.tell() != (size + 3) // 4 * 3 - rest.count(b"="):
        raise ValueError("empty or wrongly padded")
    return content.getvalue()
