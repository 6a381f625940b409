"""The body of /v1/responses, without features that need state on the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from vsched.api.compat.fields import ChatFields
from vsched.api.request_schema import Count, JsonSchema, PositiveCount
from vsched.api.unsupported import neutral


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """A piece of text from the client."""

    text: str


class ChatText(InputText, tag="text"):
    """A text part of a chat completion message."""


class InputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    """An image by its URL; `detail` is ignored."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Any = None


class SentOutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A piece of the model's output that a client sends back."""

    text: str


class SentRefusal(msgspec.Struct, tag_field="type", tag="refusal"):
    """A refusal by the model."""

    refusal: str


class SentReasoning(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning of the model that a client sends back."""

    text: str


class SentSummary(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A reasoning summary from another server."""

    text: str


InputPart = (
    InputText | ChatText | InputImage | SentOutputText | SentRefusal | SentReasoning | SentSummary
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
    PARTS: ClassVar[str] = "input_text, input_image, output_text, refusal or reasoning_text"

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

    def image_fields(self) -> Iterator[tuple[msgspec.Struct, str]]:
        """Yield each image, and the name of its URL field."""
        for item in self.input if isinstance(self.input, list) else ():
            for parts in (item.content, item.output):
                for part in parts if isinstance(parts, list) else ():
                    if isinstance(part, InputImage):
                        yield part, "image_url"
