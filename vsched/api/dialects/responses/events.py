"""What answers of /v1/responses are made of: items, the response around them, and the events of its stream."""

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
    """The text of a thought."""

    text: str


OutputPart = OutputTextPart | ReasoningPart


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """A text."""

    id: str
    status: str
    content: list[OutputPart]
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What the model thought; it is told whole, so there is no summary."""

    id: str
    status: str
    content: list[OutputPart]
    summary: list[Any] = msgspec.field(default_factory=list)


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | CallItem


class InputDetails(msgspec.Struct):
    """Where prompt tokens came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """What output tokens went into."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why an answer is not complete."""

    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """An answer: whole, or empty where a stream begins; the fields from `instructions` on are the request's."""

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
    """The last event of an answer that came to its end."""

    response: ResponseObject


class ResponseIncomplete(NumberedEvent, tag="response.incomplete"):
    """The last event of an answer that was cut."""

    response: ResponseObject


class OutputItemAdded(NumberedEvent, tag="response.output_item.added"):
    """An item begins, empty."""

    output_index: int
    item: OutputItem


class OutputItemDone(NumberedEvent, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: OutputItem


class ContentPartAdded(NumberedEvent, tag="response.content_part.added"):
    """The one part of an item begins, empty."""

    item_id: str
    output_index: int
    part: OutputPart
    content_index: int = 0


class ContentPartDone(NumberedEvent, tag="response.content_part.done"):
    """The part is complete."""

    item_id: str
    output_index: int
    part: OutputPart
    content_index: int = 0


class OutputTextDelta(NumberedEvent, tag="response.output_text.delta"):
    """A text grows."""

    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    logprobs: list[ChatLogprob] = msgspec.field(default_factory=list)


class OutputTextDone(NumberedEvent, tag="response.output_text.done"):
    """A text is complete."""

    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    logprobs: list[ChatLogprob] = msgspec.field(default_factory=list)


class ReasoningDelta(NumberedEvent, tag="response.reasoning_text.delta"):
    """A thought grows."""

    item_id: str
    output_index: int
    delta: str
    content_index: int = 0


class ReasoningDone(NumberedEvent, tag="response.reasoning_text.done"):
    """A thought is complete."""

    item_id: str
    output_index: int
    text: str
    content_index: int = 0


class ArgumentsDelta(NumberedEvent, tag="response.function_call_arguments.delta"):
    """Arguments grow."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(NumberedEvent, tag="response.function_call_arguments.done"):
    """Arguments are complete."""

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
