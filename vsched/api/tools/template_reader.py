"""Reads an answer as its checkpoint says, where no form of ours is known."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.api.tools.reader import CallArguments, CallBegins, ContentText, Event, Reasoning
from vsched.worker.capabilities import AnswerParser, AnswerPart


class TemplateReader:
    """The reader of one answer; see `AnswerReader`. With `single`, calls behind the first are left out."""

    has_open_call = False
    """Calls are emitted only when they are complete."""

    def __init__(self, parser: AnswerParser, *, single: bool = False) -> None:
        self._parser = parser
        self._single = single
        self._calls = 0

    def push(self, text: str) -> list[Event]:
        """Take the next piece of the answer; return what is certain."""
        return self._events(self._parser.push(text))

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the events held back; none is dropped, since the parser does not report the beginnings of calls."""
        del cut
        return self._events(self._parser.finish())

    def _events(self, parts: Sequence[AnswerPart]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if part.kind == "call":
                self._calls += 1
                if not self._single or self._calls == 1:
                    events += [CallBegins(part.name), CallArguments(part.text)]
            else:
                events.append(
                    ContentText(part.text) if part.kind == "content" else Reasoning(part.text)
                )
        return events
