"""/v1/messages and /v1/messages/count_tokens, served as chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from vsched.api.chat_messages import as_object
from vsched.api.checked_request import CheckedRequest
from vsched.api.compat.blocks import (
    BlockDelta,
    BlockFormatter,
    BlockKind,
    BlockStart,
    BlockStep,
    BlockStop,
    ChatFields,
    ContentBlock,
    named_as,
    shared_fields,
)
from vsched.api.completions import ChatEndpoint, check_ready
from vsched.api.errors import ParameterRefused, out_of_bounds, shown, unsupported
from vsched.api.http_exchange import HttpExchange, MessagesError, StreamEvent
from vsched.api.request_schema import (
    CalledFunction,
    ChatRequest,
    FramesPart,
    FunctionTool,
    ImagePart,
    Message,
    NamedSchema,
    NamedTool,
    PositiveCount,
    ReasoningEffort,
    ResponseFormat,
    TemplateArguments,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    VideoPart,
)
from vsched.api.response_schema import Model
from vsched.api.unsupported import neutral, refuse_unsupported, unsupported_type, with_fields


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
    """Output options."""

    format: OutputFormat | None = None
    effort: ReasoningEffort | None = None


@with_fields(
    {
        # The first two are sent to Bedrock and Vertex. The model sees the whole history: no context is managed.
        "anthropic_beta anthropic_version betas billing_policy cache_control compaction": None,
        "context_management diagnostics fallback_credit_token fallbacks inference_geo": None,
        "metadata service_tier speed user_profile_id workspace_id": None,
        "container": neutral(),
        "mcp_servers": neutral([], remedy="send their tools"),
        "output_format": neutral(remedy="send it as output_config.format"),
        "thread": neutral(remedy="send all messages with each request; no thread is kept"),
    }
)
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


_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


_DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}
"""Type of a delta, and the name of its field."""


class MessagesFormatter(BlockFormatter[MessagesEvent]):
    """Formats one response."""

    def _first_events(self) -> list[MessagesEvent]:
        message = self._response([])
        message.usage.output_tokens = 0  # the message is still empty
        return [MessagesEvent(type="message_start", message=message)]

    def _last_events(self) -> list[MessagesEvent]:
        end = {"stop_reason": self._stop_reason(), "stop_sequence": self._blocks.stop_string}
        return [
            MessagesEvent(type="message_delta", delta=end, usage=self._usage()),
            MessagesEvent(type="message_stop"),
        ]

    def _events(self, step: BlockStep) -> Iterator[MessagesEvent]:
        index = step.block.index
        match step:
            case BlockStart(block):
                empty = _output(block, "")
                yield MessagesEvent(type="content_block_start", index=index, content_block=empty)
            case BlockDelta(block, text):
                kind, name = _DELTAS[block.kind]
                delta: dict[str, str | None] = {"type": kind, name: text}
                yield MessagesEvent(type="content_block_delta", index=index, delta=delta)
            case BlockStop():
                yield MessagesEvent(type="content_block_stop", index=index)

    def _ended(self) -> MessagesResponse:
        response = self._response([_output(block, block.text) for block in self._blocks.blocks])
        response.stop_reason = self._stop_reason()
        response.stop_sequence = self._blocks.stop_string
        return response

    def _response(self, content: list[OutputBlock]) -> MessagesResponse:
        return MessagesResponse(
            id=self._generation.request_id,
            model=self._job.model,
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


def _output(block: ContentBlock, text: str) -> OutputBlock:
    match block.kind:
        case BlockKind.TEXT:
            return TextBlock(text)
        case BlockKind.REASONING:
            return ThinkingBlock(text)
        case BlockKind.CALL:
            return ToolUseBlock(block.call_id, block.name, as_object(text))


class MessagesEndpoint(ChatEndpoint):
    """Continue a conversation, with Anthropic's Messages API."""

    path = "/v1/messages"
    name = "messages"
    id_prefix = "msg"
    kinds: ClassVar[dict[str, type]] = {
        "request": MessagesRequest,
        "response": MessagesResponse,
        "event": MessagesEvent,
        "error": MessagesError,
    }

    _formatter_class = MessagesFormatter

    async def check(self, request: Any, request_id: str) -> CheckedRequest:
        """Convert a request to a chat request, and check it."""
        refuse_unsupported(request)
        with named_as(NAMES):
            return await super().check(chat_request(request), request_id)

    async def count_tokens(self, exchange: HttpExchange) -> CountedTokens:
        """Count the tokens of a conversation, with Anthropic's Messages API."""
        check_ready(self._engine)
        job = await self.read_request(exchange, "")
        return CountedTokens(len(await self._engine.tokenize(job.prompts[0], job.images)))


def messages_model(model: Model) -> MessagesModel:
    """Convert a model to Anthropic's format."""
    created_at = datetime.fromtimestamp(model.created, UTC)
    return MessagesModel(model.id, model.id, created_at, model.max_model_len)


def messages_model_list(models: Sequence[Model]) -> MessagesModelList:
    """Convert models, at least one, to Anthropic's format."""
    data = [messages_model(each) for each in models]
    return MessagesModelList(data, data[0].id, data[-1].id)


NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""Names of chat parameters in this API."""
_DIFFERENT = frozenset({"messages", "tools", "tool_choice", "chat_template_kwargs"})
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(request: MessagesRequest) -> ChatRequest:
    """Convert a body to a chat request.

    Raises:
        ParameterRefused: If it has content without a counterpart in chat requests.
    """
    choice = request.tool_choice
    single = choice is not None and choice.disable_parallel_tool_use
    messages = [*_system(request.system)]
    for message in request.messages:
        match message.role:
            case "user":
                messages += _user(message)
            case "assistant":
                messages.append(_assistant(message))
            case "system":
                messages += _system(_texts(message))
    last = messages[-1] if messages else None
    return ChatRequest(
        messages=messages,
        continue_final_message=last is not None and _is_started(last),
        stop=request.stop_sequences,
        tools=[_tool(each, index) for index, each in enumerate(request.tools or ())] or None,
        tool_choice=_choice(request),
        parallel_tool_calls=False if single else None,
        response_format=_format(request),
        chat_template_kwargs=_template_arguments(request),
        **shared_fields(request, but=_DIFFERENT),
    )


def _is_started(last: Message) -> bool:
    """True if the last message is a prefilled answer, which the model continues."""
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _system(system: str | list[TextBlock] | None) -> list[Message]:
    if not system:
        return []
    return [Message("system", system if isinstance(system, str) else _content(system))]


def _texts(message: DialogueMessage) -> str | list[TextBlock]:
    if isinstance(message.content, str):
        return message.content
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    if len(texts) < len(message.content):
        raise _misplaced("system", "text")
    return texts


def _user(message: DialogueMessage) -> list[Message]:
    """Convert a user turn; tool results become separate messages, in order."""
    if isinstance(message.content, str):
        return [Message("user", message.content)]
    made: list[Message] = []
    parts: list[ShownBlock] = []
    for block in message.content:
        match block:
            case TextBlock() | ImageBlock() | VideoPart() | FramesPart() | SearchResultBlock():
                parts.append(block)
            case ToolResultBlock(tool_use_id=call, content=content):
                if parts:
                    made.append(Message("user", _content(parts)))
                    parts = []
                text = content if isinstance(content, str) else _content(content or ())
                made.append(Message("tool", text, tool_call_id=call))
            case _:
                raise _misplaced("user", "text, image, video, search_result or tool_result")
    if parts or not made:
        made.append(Message("user", _content(parts)))
    return made


def _assistant(message: DialogueMessage) -> Message:
    if isinstance(message.content, str):
        return Message("assistant", message.content)
    parts: list[TextBlock | ImageBlock] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in message.content:
        match block:
            case TextBlock():
                parts.append(block)
            case ThinkingBlock(thinking=text):
                thoughts.append(text)
            case ToolUseBlock(id=made, name=name, input=arguments):
                calls.append(ToolCall(CalledFunction(name, arguments), made))
            case RedactedThinkingBlock():
                pass
            case _:
                raise _misplaced("assistant", "text, tool_use or thinking")
    return Message(
        "assistant",
        _content(parts),
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def _misplaced(role: str, allowed: str) -> ParameterRefused:
    return out_of_bounds(
        "messages",
        value=f"another content block with role {role}",
        limit=allowed,
        remedy="send it in a message with a matching role",
    )


def _content(blocks: Sequence[ShownBlock]) -> str | list[Any]:
    """Convert blocks to content; a single text block becomes a string, which every template accepts."""
    parts = [_part(block) for block in blocks]
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return "".join(texts) if len(texts) == len(parts) <= 1 else parts


def _part(block: ShownBlock) -> TextPart | ImagePart | VideoPart | FramesPart:
    match block:
        case VideoPart() | FramesPart():
            return block
        case TextBlock(text=text):
            return TextPart(text)
        case ImageBlock():
            return _image(block)
        case SearchResultBlock(content=content, source=source, title=title):
            return TextPart(
                "\n".join(filter(None, (title, source, *(one.text for one in content))))
            )
        case ToolReferenceBlock(tool_name=name):
            return TextPart(name)


def _image(block: ImageBlock) -> ImagePart:
    source = block.source
    if source.type == "url" and source.url:
        return ImagePart(source.url)
    if source.type == "base64" and source.data and source.media_type:
        return ImagePart(f"data:{source.media_type};base64,{source.data}")
    raise out_of_bounds(
        "messages",
        value=f"an image whose source is {shown(source.type)}",
        limit="base64 with data and media_type, or url with url",
        remedy="send the image in one of these ways",
    )


def _tool(tool: MessagesTool, index: int) -> Tool:
    if tool.type not in {None, "custom"}:
        remedy = "describe a function with name and input_schema for the client to carry out"
        where = f"tools[{index}]"
        raise unsupported_type(tool.type, where) or unsupported(f"{where}.type", remedy=remedy)
    return Tool(function=FunctionTool(tool.name, tool.description, tool.input_schema))


def _choice(request: MessagesRequest) -> str | ToolChoice | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type == "tool" and choice.name:
        return ToolChoice("function", NamedTool(choice.name))
    if choice.type not in _CHOICES:
        raise out_of_bounds(
            "tool_choice.type",
            value=shown(choice.type),
            limit="auto, any, none, or tool with a name",
            remedy="send one of these",
        )
    return _CHOICES[choice.type]


def _format(request: MessagesRequest) -> ResponseFormat | None:
    sent = request.output_config.format if request.output_config is not None else None
    if sent is None:
        return None
    if sent.type != "json_schema":
        raise unsupported("output_config.format.type", remedy="send json_schema as its type")
    return ResponseFormat("json_schema", NamedSchema(schema=sent.schema))


def _template_arguments(request: MessagesRequest) -> TemplateArguments:
    arguments: TemplateArguments = {}
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
        arguments |= {"enable_thinking": thinks, "thinking": thinks}
    if request.output_config is not None and request.output_config.effort is not None:
        arguments["reasoning_effort"] = request.output_config.effort
    return arguments | (request.chat_template_kwargs or {})
