"""How many values a JSON body holds, found out before it is decoded.

Decoding holds the GIL, and for 30 MB of empty lists that takes two seconds and a gigabyte. What makes a body expensive
is not its size, which images need, but the number of its values; no legal request has many. They are counted in a
thread, slice by slice, so that the event loop goes on.
"""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from vsched.errors import RequestRefused, limit_message

SMALL_BYTES = 256 * 1024
"""A body up to this size is decoded as it is: it cannot take long."""
VALUES_MAX = 128 * 1024
"""Beyond the tokens of the context, each of which can be a value of a prompt."""
ESCAPES_MAX = 1024 * 1024
"""Backslashes of a body, beyond sixteen for each token of the context: what has them takes long to decode, too."""
_SLICE_BYTES = 1024 * 1024


async def check_json_values(body: bytes, context_tokens: int) -> None:
    """Refuse a body whose decoding would take long.

    Raises:
        RequestRefused: With status 413.
    """
    if len(body) > SMALL_BYTES:
        await asyncio.to_thread(_check, body, context_tokens)


def _check(body: bytes, context_tokens: int) -> None:
    limit = VALUES_MAX + context_tokens
    if _exceeds(body, limit):
        raise _refusal("JSON values", limit, "send fewer messages, content parts or tokens")
    limit = ESCAPES_MAX + 16 * context_tokens
    slices = range(0, len(body), _SLICE_BYTES)  # other threads run between two of them
    if sum(body.count(b"\\", start, start + _SLICE_BYTES) for start in slices) > limit:
        raise _refusal("backslashes", limit, "shorten the text, or send its characters unescaped")


def _refusal(what: str, limit: int, remedy: str) -> RequestRefused:
    message = limit_message(
        f"the request body has too many {what}", value=f"over {limit}", limit=limit, remedy=remedy
    )
    return RequestRefused(message, code="too_many_values", status=413)


def _exceeds(body: bytes, limit: int) -> bool:
    # Nearly every body passes the cheap count, which takes what stands in strings for values as well.
    marks = 0
    for start in range(0, len(body), _SLICE_BYTES):
        piece = np.frombuffer(body[start : start + _SLICE_BYTES], np.uint8)
        marks += int(np.count_nonzero(_marks(piece)))
        if marks > limit:
            return count_values(body, limit) > limit
    return False


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
    found: npt.NDArray[np.bool_] = characters == ord(",")
    found |= characters == ord("[")
    found |= characters == ord("{")
    return found
