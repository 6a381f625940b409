"""Marks in a text that comes in pieces: where one is, and what may yet become one."""

from __future__ import annotations

from collections.abc import Sequence


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def longest_overlap(text: str, marks: Sequence[str]) -> int:
    """Return how much of the end of `text` may be the beginning of one of these marks."""
    return max((overlap(text, mark) for mark in marks), default=0)


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return where the first of these marks is, and which; -1 where there is none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))
