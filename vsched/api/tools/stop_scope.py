"""Where in an answer stop strings are looked for: not in calls, of which clients do not see the text as it is."""

from __future__ import annotations

from typing import Any

from vsched.api.tools.formats import CallFormat
from vsched.api.tools.reader import AnswerReader


class CallStopScope(AnswerReader):
    """Parts the text of an answer into calls, in which no stop string counts, and the rest."""

    def __init__(self, calls: CallFormat | None, **options: Any) -> None:
        """Take what an `AnswerReader` takes."""
        super().__init__(calls, **options)
        self._in_call = (self._head, self._arguments, self._rest_of_object, self._after)
        self._parts: list[tuple[str, bool]] = []

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Take the next piece of the answer; return the text whose kind is known, and whether stop strings count."""
        self.push(text)
        return self._taken()

    def split_rest(self, *, cut: bool) -> list[tuple[str, bool]]:
        """Return what was held back."""
        self.finish(cut=cut)
        return [*self._taken(), (self._buffer + self._half, False)]

    def _taken(self) -> list[tuple[str, bool]]:
        parts, self._parts = self._parts, []
        return parts

    def _take(self, count: int) -> str:
        counts = self._state not in self._in_call
        taken = super()._take(count)
        self._parts.append((taken, counts))
        return taken
