"""Arguments in JSON: passed on unchanged, up to the closing bracket."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class JsonScan:
    """Finds the end of a bracketed JSON value in streamed text."""

    __slots__ = ("_depth", "_escaped", "_in_text")

    def __init__(self, depth: int = 0) -> None:
        """Start before a bracket, or within `depth` brackets."""
        self._depth = depth
        self._in_text = False
        self._escaped = False

    def end(self, text: str, start: int = 0) -> int:
        """Process the next piece, from `start` on; return the index after the last bracket, or -1."""
        at = start
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while found := (_INSIDE if self._in_text else _OUTSIDE).search(text, at):
            at = found.end()
            match found[0]:
                case '"':
                    self._in_text = not self._in_text
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return -1

    def take(self, text: str, *, ended: bool) -> tuple[int, str, bool]:
        """Process the next piece of the arguments; see `ArgumentScan`."""
        del ended  # nothing is held back
        end = self.end(text)
        count = end if end >= 0 else len(text)
        return count, text[:count], end >= 0
