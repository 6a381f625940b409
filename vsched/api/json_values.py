"""How many values a JSON body holds, found out before it is decoded.

Decoding holds the GIL, and for 30 MB of empty lists that takes two seconds and a gigabyte. What makes a body expensive
is not its size, which images need, but the number of its values; no legal request has many. Those of a large body are
counted in a thread, so that the event loop goes on, and all slice by slice, which stays in the processor's cache.
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
_THREAD_BYTES = 1024 * 1024
_SLICE_BYTES = 64 * 1024
_MARKS = (ord(","), ord("["), ord("{"))


async def check_json_values(body: bytes, context_tokens: int) -> None:
    """Refuse a body whose decoding would take long.

    Raises:
        RequestRefused: With status 413.
    """
    if len(body) > _THREAD_BYTES:
        await asyncio.to_thread(_check, body, context_tokens)
    elif len(body) > SMALL_BYTES:
        _check(body, context_tokens)  # takes less than going to a thread


def _check(body: bytes, context_tokens: int) -> None:
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
