"""The body of /v1/messages. Anthropic's fields without an effect here are accepted and ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from vsched.api.compat.fields import ChatFields
from vsched.api.request_schema import PositiveCount
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


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """Result of a tool call; the model learns from its content that it is an error."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | SearchResultBlock | ToolReferenceBlock] | None = (
        None
    )
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of the model; the signature is ignored."""

    thinking: str


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server; it is dropped."""


class DialogueMessage(msgspec.Struct):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: (
        str
        | list[
            TextBlock
            | ImageBlock
            | SearchResultBlock
            | ToolUseBlock
            | ToolResultBlock
            | ThinkingBlock
            | RedactedThinkingBlock
        ]
    )


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
    PARTS: ClassVar[str] = "text, image, search_result, tool_use, tool_result or thinking"
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

    def image_fields(self) -> Iterator[tuple[msgspec.Struct, str]]:
        """Yield each image source, and the name of its base64 field."""
        for message in self.messages:
            for block in message.content if isinstance(message.content, list) else ():
                inner = block.content if isinstance(block, ToolResultBlock) else [block]
                for each in inner if isinstance(inner, list) else ():
                    if isinstance(each, ImageBlock):
                        yield each.source, "data"
