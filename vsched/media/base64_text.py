"""Base64 within a text, or stored separately if it is long."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import numpy as np
import pybase64

_PIECE_BYTES = 1024 * 1024
"""Bytes decoded at a time, with the GIL held: 0.2 ms, a tenth of the standard library's time."""
_WHITESPACE = b"\t\n\f\r "
_HEX_VALUES = np.full(256, 16, np.uint8)
"""The value of each hexadecimal digit; 16 for other characters."""
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _HEX_VALUES[list(_digits)] = range(16)


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

    As in a browser's `data:` URL, it may contain whitespace, lack padding, be percent-encoded, and have a fragment,
    which is ignored.

    Raises:
        ValueError: If it is invalid, empty or wrongly padded.
    """
    try:
        return _decode_pieces(_pieces(base64))
    except ValueError:
        return _decode_pieces(_plain_pieces(_pieces(base64)))


def plain_base64_bytes(text: str, start: int) -> int:
    """Length of the base64 in `text` from `start` on, percent-decoded and without whitespace.

    Raises:
        ValueError: If the text has characters that are not ASCII.
    """
    if isinstance(text, TextWithBase64):
        pieces = _pieces(text.base64)
    else:
        ends = range(start, len(text), _PIECE_BYTES)
        pieces = (text[at : at + _PIECE_BYTES].encode("ascii") for at in ends)
    return sum(map(len, _plain_pieces(pieces)))


def percent_decode(encoded: bytes) -> bytes:
    """Decode the percent-encoded body of a `data:` URL, without its fragment."""
    return b"".join(_percent_decoded_pieces(_pieces(encoded)))


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


def _pieces(content: bytes) -> Iterator[bytes]:
    for at in range(0, len(content), _PIECE_BYTES):
        yield content[at : at + _PIECE_BYTES]


def _plain_pieces(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in _percent_decoded_pieces(pieces):
        yield piece.translate(None, _WHITESPACE)


def _percent_decoded_pieces(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        content, fragment, _ = (rest + piece).partition(b"#")
        cut = content.rfind(b"%", max(len(content) - 2, 0))  # its digits may be in the next piece
        end = cut if cut >= 0 else len(content)
        yield _percent_decoded(content[:end])
        rest = content[end:]
        if fragment:
            break
    yield rest


def _percent_decoded(piece: bytes) -> bytes:
    if b"%" not in piece:
        return piece
    characters = np.frombuffer(piece, np.uint8).copy()
    values = _HEX_VALUES[characters]
    [marks] = np.nonzero(characters[:-2] == ord("%"))
    marks = marks[(values[marks + 1] < 16) & (values[marks + 2] < 16)]
    characters[marks] = values[marks + 1] * 16 + values[marks + 2]
    keep = np.ones(len(piece), bool)
    keep[marks + 1] = keep[marks + 2] = False
    return characters[keep].tobytes()
