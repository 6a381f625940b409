"""Parsing of output with a checkpoint's `response_template`, by transformers' parser.

The parser recognizes complete tool calls only, so calls are not streamed. Text that it cannot parse becomes content:
nothing is lost.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vsched.worker.contract import AnswerPart

logger = logging.getLogger(__name__)

CALLS = "tool_calls"
REASONING = frozenset(["thinking", "reasoning", "reasoning_content"])
"""Field names of reasoning in templates; all other fields are content."""


class TemplateParser:
    """Parses one output; see `vsched.worker.contract.AnswerParser`."""

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """Begin after a prompt, whose end may contain the beginning of the output."""
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(
            dict(template), prefix=prompt, tools=[dict(each) for each in tools]
        )
        self._unread = ""
        self._broken = False
        self._started: set[str] = set()

    def push(self, text: str) -> list[AnswerPart]:
        """Take the next piece of the output; return the parts that are complete.

        It is parsed character by character: a failing parser returns nothing for a piece, and the result must not
        depend on how the text is split.
        """
        parts: list[AnswerPart] = []
        for at, letter in enumerate(text):
            if self._broken:
                return [*parts, AnswerPart("content", text[at:])]
            self._unread += letter
            try:
                events = self._parser.feed(letter)
            except Exception:  # noqa: BLE001 - patterns and conversions of the checkpoint
                parts += self._give_up()
            else:
                parts += self._parts(events)
        return parts

    def finish(self) -> list[AnswerPart]:
        """Return the parts that were held back."""
        if self._broken:
            return []
        try:
            _, events = self._parser.finalize()
        except Exception:  # noqa: BLE001 - as above
            return self._give_up()
        return self._parts(events)

    def _give_up(self) -> list[AnswerPart]:
        """Return the unread text as content, and treat all that follows as content."""
        logger.info("an answer does not fit the checkpoint's response_template")
        self._broken = True
        return [AnswerPart("content", self._unread)] if self._unread else []

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if field == CALLS and kind == "region_close":
                parts += self._calls(event["value"])
                self._unread = ""
            elif field != CALLS and kind == "region_chunk":
                self._unread = self._unread.partition(event["text"])[2]
                text = event["text"] if field in self._started else event["text"].lstrip()
                if text:
                    self._started.add(field)
                    reported: Literal["reasoning", "content"] = (
                        "reasoning" if field in REASONING else "content"
                    )
                    parts.append(AnswerPart(reported, text))
        return parts

    def _calls(self, value: Any) -> list[AnswerPart]:
        """Return the tool calls in a region; its text if one of them is invalid."""
        found = [_call_of(each) for each in (value if isinstance(value, list) else [value])]
        if None in found:
            return [AnswerPart("content", self._unread)]
        return [each for each in found if each is not None]


def _call_of(value: Any) -> AnswerPart | None:
    held = value.get("function", value) if isinstance(value, dict) else {}
    name, arguments = held.get("name"), held.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return AnswerPart("call", text, name)
