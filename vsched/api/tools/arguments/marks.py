"""Search for markers in streamed text, including partial ones at its end."""

from __future__ import annotations

from collections.abc import Sequence


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def longest_overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that may be the start of one of these markers."""
    return max((overlap(text, mark) for mark in marks), default=0)


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Position of the first of these markers, and the marker; -1 if there is none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))
