"""The body of /v1/responses, without features that need state on the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from vsched.api.bodies.long_base64 import base64_fields
from vsched.api.compat.fields import ChatFields
from vsched.api.http_exchange import NumberedEvent
from vsched.api.request_schema import (
    AnswerTextPart,
    Count,
    FramesPart,
    InputTextPart,
    JsonSchema,
    PositiveCount,
    RefusalPart,
    TextPart,
    VideoPart,
)
from vsched.api.response_schema import ChatLogprob
from vsched.api.unsupported import neutral


class InputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    """An image by its URL; `detail` is ignored."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Any = None


class SentReasoning(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning of the model that a client sends back."""

    text: str


class SentSummary(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A reasoning summary from another server."""

    text: str


SeenPart = InputImage | VideoPart | FramesPart
"""Images and videos; videos are an extension of the API."""

InputPart = (
    InputTextPart
    | TextPart
    | InputImage
    | VideoPart
    | FramesPart
    | AnswerTextPart
    | RefusalPart
    | SentReasoning
    | SentSummary
)


class InputItem(msgspec.Struct):
    """One item of the input; the required fields depend on its type."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    id: Any = None
    status: Any = None
    phase: Any = None
    encrypted_content: Any = None


class ResponsesTool(msgspec.Struct):
    """A function that the model may call, without the wrapper object of chat requests."""

    type: str
    name: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ChosenTool(msgspec.Struct):
    """A tool by its name."""

    type: str = "function"
    name: str | None = None


class ResponsesToolChoice(msgspec.Struct, omit_defaults=True):
    """Tool choice in object form."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[ChosenTool] | None = None


class ResponsesFormat(msgspec.Struct, omit_defaults=True):
    """Format of the output: `text`, `json_object`, or `json_schema` with a schema."""

    type: str
    name: str | None = None
    schema: JsonSchema | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, omit_defaults=True):
    """Text options; `verbosity` is ignored."""

    format: ResponsesFormat | None = None
    verbosity: Any = None


_HISTORY = "send the whole history as input; the server keeps nothing"


class ResponsesRequest(ChatFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/responses."""

    ROLES: ClassVar[str] = "system, developer, user or assistant"
    PARTS: ClassVar[str] = (
        "input_text, input_image, video_url, video, output_text, refusal or reasoning_text"
    )

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Count | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None

    background: Annotated[Any, neutral(False, remedy="stream, or wait for the answer")] = None
    conversation: Annotated[Any, neutral(remedy=_HISTORY)] = None
    previous_response_id: Annotated[Any, neutral(remedy=_HISTORY)] = None
    prompt: Annotated[Any, neutral(remedy="send its text as instructions or input")] = None
    truncation: Annotated[Any, neutral("disabled", remedy="send an input that fits")] = None

    access_programs: Any = None
    background_options: Any = None
    client_metadata: Any = None
    context_management: Any = None
    image: Any = None
    max_tool_calls: Any = None
    metadata: Any = None
    moderation: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None  # ignored, as in chat completions; the response has `store: false`
    stream_options: Any = None
    user: Any = None

    def image_fields(self) -> Iterator[tuple[Any, str]]:
        """Yield each image and video, and the name of its URL field."""
        for item in self.input if isinstance(self.input, list) else ():
            for parts in (item.content, item.output):
                for part in parts if isinstance(parts, list) else ():
                    if isinstance(part, InputImage):
                        yield part, "image_url"
                    yield from base64_fields(part)


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


class ResponsesEvent(NumberedEvent, kw_only=True):
    """An event of a stream of /v1/responses; its fields depend on its type.

    Events about the response are `response.created`, `.in_progress`, and at the end `.completed` or `.incomplete`;
    those of an item `.output_item.added` and `.done`; those of the only part of an item `.content_part.added` and
    `.done`. Text is appended by `.output_text.delta`, `.reasoning_text.delta` and `.function_call_arguments.delta`;
    each has a `.done` with the whole text.
    """

    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
