"""The scope of stop strings in chats: content and reasoning, not tool calls, whose raw text clients do not see."""

from __future__ import annotations

from typing import Any

from vsched.api.tools.formats import CallFormat
from vsched.api.tools.reader import AnswerReader


class CallStopScope(AnswerReader):
    """Splits the output into tool calls, in which stop strings do not apply, and the rest."""

    def __init__(self, calls: CallFormat | None, **options: Any) -> None:
        """Take the arguments of `AnswerReader`."""
        super().__init__(calls, **options)
        self._in_call = (self._head, self._arguments, self._rest_of_object, self._after)
        self._parts: list[tuple[str, bool]] = []

    def split(self, text: str) -> list[tuple[str, bool]]:
        """See `StopScope.split`."""
        self.push(text)
        return self._taken()

    def split_rest(self, *, cut: bool) -> list[tuple[str, bool]]:
        """See `StopScope.split_rest`."""
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
