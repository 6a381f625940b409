"""Adapter for a checkpoint's own response parser, used if its format is not a known one."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.api.tools.reader import CallArguments, CallBegins, ContentText, Event, Reasoning
from vsched.worker.contract import AnswerParser, AnswerPart


class TemplateReader:
    """Parser of one choice; see `AnswerReader`. With `single`, calls after the first are dropped."""

    has_open_call = False
    """Calls are emitted only when they are complete."""

    def __init__(self, parser: AnswerParser, *, single: bool = False) -> None:
        self._parser = parser
        self._single = single
        self._calls = 0

    def push(self, text: str) -> list[Event]:
        """Process the next piece of the output; return the events that are certain."""
        return self._events(self._parser.push(text))

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the events held back; none is dropped, because the parser does not report partial calls."""
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
