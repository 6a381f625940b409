"""Responses of Anthropic's API, streaming and non-streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vsched.aio.streams.stream import OutputDelta
from vsched.api.contract import Generation
from vsched.api.dialects.blocks import (
    AnswerBlock,
    AnswerBlocks,
    BlockBegins,
    BlockEnds,
    BlockGrows,
    BlockKind,
    BlockStep,
)
from vsched.api.responses import Usage
from vsched.api.tools.history import as_object
from vsched.api.wire_forms import StreamEvent

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesUsage(msgspec.Struct):
    """Token counts of a request; `input_tokens` excludes cached ones."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextOutput(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class ThinkingOutput(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of the model, without a signature."""

    thinking: str
    signature: str = ""


class ToolUseOutput(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A function call."""

    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextOutput | ThinkingOutput | ToolUseOutput


class MessagesResponse(msgspec.Struct, kw_only=True):
    """A complete response, or an empty one at the start of a stream."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class MessageStart(StreamEvent, tag="message_start"):
    """The first event."""

    message: MessagesResponse


class ContentBlockStart(StreamEvent, tag="content_block_start"):
    """Start of a block, still empty."""

    index: int
    content_block: OutputBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """Text appended to a text block."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """Text appended to a thinking block."""

    thinking: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """Text appended to the arguments of a tool call."""

    partial_json: str


_DELTAS: dict[BlockKind, type[TextDelta | ThinkingDelta | InputJsonDelta]] = {
    BlockKind.TEXT: TextDelta,
    BlockKind.REASONING: ThinkingDelta,
    BlockKind.CALL: InputJsonDelta,
}


class ContentBlockDelta(StreamEvent, tag="content_block_delta"):
    """Content appended to a block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(StreamEvent, tag="content_block_stop"):
    """End of a block."""

    index: int


class StopDelta(msgspec.Struct):
    """Stop reason."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(StreamEvent, tag="message_delta"):
    """End of the message, with its total usage."""

    delta: StopDelta
    usage: MessagesUsage


class MessageStop(StreamEvent, tag="message_stop"):
    """The last event."""


MessagesEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)


class CountedTokens(msgspec.Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesFormatter:
    """Formats one response."""

    def __init__(self, generation: Generation, *, model: str, blocks: AnswerBlocks) -> None:
        self._generation = generation
        self._model = model
        self._blocks = blocks
        self._started = False

    def chunk(self, delta: OutputDelta) -> list[MessagesEvent]:
        """Events of a delta, none without text; the first and last delta have additional ones."""
        events: list[MessagesEvent] = []
        if not self._started:
            message = self._response([])
            message.usage.output_tokens = 0  # the message is still empty
            events.append(MessageStart(message=message))
            self._started = True
        events += map(_event, self._blocks.take(delta))
        if self._blocks.finish_reason:
            end = StopDelta(self._stop_reason(), self._blocks.stop_string)
            events += [MessageDelta(delta=end, usage=self._usage()), MessageStop()]
        return events

    def usage_chunk(self, usage: Usage) -> list[MessagesEvent]:
        """Return no events: the event before the last one has the usage."""
        del usage
        return []

    def whole(self, deltas: Sequence[OutputDelta], usage: Usage) -> MessagesResponse:
        """Return the response that corresponds to all events of a stream."""
        del usage
        for delta in deltas:
            self._blocks.take(delta)
        response = self._response([_output(block, block.text) for block in self._blocks.blocks])
        response.stop_reason = self._stop_reason()
        response.stop_sequence = self._blocks.stop_string
        return response

    def _response(self, content: list[OutputBlock]) -> MessagesResponse:
        return MessagesResponse(
            id=self._generation.request_id,
            model=self._model,
            content=content,
            usage=self._usage(),
        )

    def _usage(self) -> MessagesUsage:
        generation = self._generation
        cached = generation.cached_tokens
        return MessagesUsage(generation.prompt_tokens - cached, generation.output_tokens, cached)

    def _stop_reason(self) -> str:
        if self._blocks.stop_string is not None and self._blocks.finish_reason == "stop":
            return "stop_sequence"
        reason = self._blocks.finish_reason
        return _REASONS.get(reason, reason)


def _event(step: BlockStep) -> ContentBlockStart | ContentBlockDelta | ContentBlockStop:
    index = step.block.index
    match step:
        case BlockBegins(block):
            return ContentBlockStart(index=index, content_block=_output(block, ""))
        case BlockGrows(block, text):
            return ContentBlockDelta(index=index, delta=_DELTAS[block.kind](text))
        case BlockEnds():
            return ContentBlockStop(index=index)


def _output(block: AnswerBlock, text: str) -> OutputBlock:
    match block.kind:
        case BlockKind.TEXT:
            return TextOutput(text)
        case BlockKind.REASONING:
            return ThinkingOutput(text)
        case BlockKind.CALL:
            return ToolUseOutput(block.call_id, block.name, as_object(text))
