"""Output of /v1/responses: items, the response object, and stream events."""

from __future__ import annotations

from typing import Any

import msgspec

from vsched.api.dialects.blocks import BlockKind
from vsched.api.dialects.responses.schema import (
    ResponsesTool,
    ResponsesToolChoice,
    TextOptions,
)
from vsched.api.responses import ChatLogprob
from vsched.api.wire_forms import NumberedEvent


class OutputTextPart(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[ChatLogprob] = msgspec.field(default_factory=list)


class ReasoningPart(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str


OutputPart = OutputTextPart | ReasoningPart


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """A message."""

    id: str
    status: str
    content: list[OutputPart]
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Reasoning of the model; its full text is included, so there is no summary."""

    id: str
    status: str
    content: list[OutputPart]
    summary: list[Any] = msgspec.field(default_factory=list)


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function call."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | CallItem


class InputDetails(msgspec.Struct):
    """Origin of prompt tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Kinds of output tokens."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    """Token counts of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Reason that a response is incomplete."""

    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, empty at the start of a stream; the fields from `instructions` on repeat the request."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage | None
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Any
    parallel_tool_calls: bool
    reasoning: Any
    temperature: float | None
    text: TextOptions
    tool_choice: str | ResponsesToolChoice
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float | None
    user: Any
    background: bool = False
    previous_response_id: None = None
    store: bool = False
    truncation: str = "disabled"


class ResponseCreated(NumberedEvent, tag="response.created"):
    """The first event."""

    response: ResponseObject


class ResponseInProgress(NumberedEvent, tag="response.in_progress"):
    """The second event."""

    response: ResponseObject


class ResponseCompleted(NumberedEvent, tag="response.completed"):
    """The last event of a completed response."""

    response: ResponseObject


class ResponseIncomplete(NumberedEvent, tag="response.incomplete"):
    """The last event of a truncated response."""

    response: ResponseObject


class OutputItemAdded(NumberedEvent, tag="response.output_item.added"):
    """Start of an item, still empty."""

    output_index: int
    item: OutputItem


class OutputItemDone(NumberedEvent, tag="response.output_item.done"):
    """End of an item."""

    output_index: int
    item: OutputItem


class ContentPartAdded(NumberedEvent, tag="response.content_part.added"):
    """Start of the only part of an item, still empty."""

    item_id: str
    output_index: int
    part: OutputPart
    content_index: int = 0


class ContentPartDone(NumberedEvent, tag="response.content_part.done"):
    """End of the part."""

    item_id: str
    output_index: int
    part: OutputPart
    content_index: int = 0


class OutputTextDelta(NumberedEvent, tag="response.output_text.delta"):
    """Text appended to a message."""

    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    logprobs: list[ChatLogprob] = msgspec.field(default_factory=list)


class OutputTextDone(NumberedEvent, tag="response.output_text.done"):
    """End of a text."""

    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    logprobs: list[ChatLogprob] = msgspec.field(default_factory=list)


class ReasoningDelta(NumberedEvent, tag="response.reasoning_text.delta"):
    """Text appended to a reasoning item."""

    item_id: str
    output_index: int
    delta: str
    content_index: int = 0


class ReasoningDone(NumberedEvent, tag="response.reasoning_text.done"):
    """End of a reasoning text."""

    item_id: str
    output_index: int
    text: str
    content_index: int = 0


class ArgumentsDelta(NumberedEvent, tag="response.function_call_arguments.delta"):
    """Text appended to the arguments of a call."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(NumberedEvent, tag="response.function_call_arguments.done"):
    """End of the arguments."""

    item_id: str
    output_index: int
    arguments: str
    name: str


ResponsesEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)

DELTAS: dict[BlockKind, type[OutputTextDelta | ReasoningDelta | ArgumentsDelta]] = {
    BlockKind.TEXT: OutputTextDelta,
    BlockKind.REASONING: ReasoningDelta,
    BlockKind.CALL: ArgumentsDelta,
}
