"""Convert parser events to OpenAI's format, the same for stream chunks and complete messages."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from msgspec import UNSET

from vsched.api.response_schema import (
    ChatDelta,
    ChatMessage,
    FunctionOutput,
    ToolCallDelta,
    ToolCallOutput,
)
from vsched.api.tools.reader import (
    CallStart,
    CheckpointParser,
    ContentText,
    Event,
    OutputParser,
    Reasoning,
)

ID_CHARACTERS = 9
"""Length of a call id: Mistral's templates require this one; others accept any."""


class MessageBuilder:
    """Formats one choice; every call gets an id. With `hides_reasoning`, reasoning is dropped.

    The ids are derived from the choice's id, so that they are the same if it is formatted again.

    Attributes:
        is_silent: True if the last piece was only markup, for which no event is sent.
    """

    is_silent = False

    def __init__(
        self,
        reader: OutputParser | CheckpointParser,
        *,
        choice_id: str,
        hides_reasoning: bool = False,
        has_tools: bool = False,
        forced: bool = False,
    ) -> None:
        """Use a parser; `has_tools` means that the output may contain calls, `forced` that it must."""
        self._reader = reader
        self._choice_id = choice_id
        self._hides_reasoning = hides_reasoning
        self._has_tools = has_tools
        self._forced = forced
        self._calls = 0

    def added(self, text: str, reason: str | None) -> ChatDelta:
        """Format the next piece of text; `reason` is the finish reason of the last piece."""
        events = self._reader.push(text)
        if reason is not None:
            events += self._reader.finish(cut=reason == "length")
        self.is_silent = self._has_tools and not events
        return self._delta(events)

    def message(self, text: str, reason: str) -> ChatMessage:
        """Format a complete output with this finish reason."""
        added = self.added(text, reason)
        calls = added.tool_calls or []
        return ChatMessage(
            added.content or (None if calls else ""),
            tool_calls=[ToolCallOutput(str(each.id), each.function) for each in calls] or UNSET,
            reasoning_content=added.reasoning_content,
            reasoning=added.reasoning,
        )

    def finish_reason(self, reason: str) -> str:
        """OpenAI's finish reason: `tool_calls` only if all calls are complete."""
        has_called = self._calls > 0 and not self._reader.has_open_call
        return "tool_calls" if reason == "stop" and has_called else reason

    def _delta(self, events: Sequence[Event]) -> ChatDelta:
        content = reasoning = ""
        calls: list[ToolCallDelta] = []
        for event in events:
            if isinstance(event, ContentText):
                content += event.text
            elif isinstance(event, Reasoning):
                reasoning += "" if self._hides_reasoning else event.text
            elif isinstance(event, CallStart):
                made = self._call_id()
                started = FunctionOutput(event.name)
                calls.append(ToolCallDelta(self._calls, started, id=made, type="function"))
                self._calls += 1
            else:
                if not calls:  # continues from an earlier piece
                    calls.append(ToolCallDelta(self._calls - 1, FunctionOutput()))
                calls[-1].function.arguments += event.text
        return ChatDelta(
            content=content if content or not (calls or reasoning or self._forced) else UNSET,
            tool_calls=calls or UNSET,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or UNSET,
        )

    def _call_id(self) -> str:
        name = f"{self._choice_id}/{self._calls}".encode()
        return blake2b(name, person=b"vsched.call").hexdigest()[:ID_CHARACTERS]
