"""The body of /v1/messages. Anthropic's fields without an effect here are accepted and ignored."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from vsched.api.bodies.long_base64 import base64_fields
from vsched.api.compat.fields import ChatFields
from vsched.api.http_exchange import StreamEvent
from vsched.api.request_schema import FramesPart, PositiveCount, VideoPart
from vsched.api.unsupported import neutral


class ImageSource(msgspec.Struct):
    """Source of an image: `base64` with `data` and `media_type`, or `url`."""

    type: str
    data: str | None = None
    media_type: str | None = None
    url: str | None = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """An image."""

    source: ImageSource


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call by the model."""

    id: str
    name: str
    input: dict[str, Any] | None = None


class SearchResultBlock(msgspec.Struct, tag_field="type", tag="search_result"):
    """A source with its text; citations are not generated."""

    content: list[TextBlock]
    source: str = ""
    title: str = ""


class ToolReferenceBlock(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """A tool found by a tool search; the model sees all tools from the beginning."""

    tool_name: str


ShownBlock = (
    TextBlock | ImageBlock | VideoPart | FramesPart | SearchResultBlock | ToolReferenceBlock
)
"""Content that the model reads; videos are an extension of the API."""


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """Result of a tool call; the model learns from its content that it is an error."""

    tool_use_id: str
    content: str | list[ShownBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of the model; a signature is ignored, and the server's own is empty."""

    thinking: str
    signature: Any = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server; it is dropped."""


SentBlock = (
    TextBlock
    | ImageBlock
    | VideoPart
    | FramesPart
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)


class DialogueMessage(msgspec.Struct):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[SentBlock]


class MessagesTool(msgspec.Struct):
    """A function that the model may call; `input_schema` is the JSON schema of its arguments."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesToolChoice(msgspec.Struct):
    """Tool choice: `auto`, `any`, `tool` with a name, or `none`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Reasoning switch: `disabled`, or any other type for enabled."""

    type: str


class OutputFormat(msgspec.Struct):
    """Format of the output: `json_schema`."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    """Output options; `effort` is ignored."""

    format: OutputFormat | None = None
    effort: Any = None


class MessagesRequest(ChatFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/messages and /v1/messages/count_tokens."""

    ROLES: ClassVar[str] = "user, assistant or system"
    PARTS: ClassVar[str] = (
        "text, image, video_url, video, search_result, tool_use, tool_result or thinking"
    )
    SERVED: ClassVar[frozenset[str]] = frozenset({"custom"})

    messages: list[DialogueMessage]
    max_tokens: PositiveCount | None = None
    system: str | list[TextBlock] | None = None
    stop_sequences: list[str] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None

    container: Annotated[Any, neutral()] = None
    mcp_servers: Annotated[Any, neutral([], remedy="send their tools")] = None
    output_format: Annotated[Any, neutral(remedy="send it as output_config.format")] = None
    thread: Annotated[
        Any, neutral(remedy="send all messages with each request; no thread is kept")
    ] = None
    anthropic_beta: Any = None  # sent to Bedrock and Vertex, like the next field
    anthropic_version: Any = None
    betas: Any = None
    billing_policy: Any = None
    cache_control: Any = None
    compaction: Any = None
    context_management: Any = None  # the model sees the whole history instead
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    def image_fields(self) -> Iterator[tuple[Any, str]]:
        """Yield each video and image source, and the name of its base64 field."""
        for message in self.messages:
            for block in message.content if isinstance(message.content, list) else ():
                inner = block.content if isinstance(block, ToolResultBlock) else [block]
                for each in inner if isinstance(inner, list) else ():
                    if isinstance(each, ImageBlock):
                        yield each.source, "data"
                    yield from base64_fields(each)


class MessagesUsage(msgspec.Struct):
    """Token counts of a request; `input_tokens` excludes cached ones."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


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


class MessagesEvent(StreamEvent, kw_only=True):
    """An event of a stream of /v1/messages; its fields depend on its type.

    The types are `message_start` with the empty message; `content_block_start`, `content_block_delta` and
    `content_block_stop` with the index of a block; `message_delta` with the stop reason and the total usage; and
    `message_stop`.
    """

    message: MessagesResponse | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: OutputBlock | UnsetType = UNSET
    delta: dict[str, str | None] | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET


class CountedTokens(msgspec.Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesModel(msgspec.Struct, tag_field="type", tag="model"):
    """The served model or an adapter."""

    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int
    lifecycle: str = "active"


class MessagesModelList(msgspec.Struct):
    """All models, on one page."""

    data: list[MessagesModel]
    first_id: str
    last_id: str
    has_more: bool = False
