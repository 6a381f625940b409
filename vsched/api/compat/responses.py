"""/v1/responses, served as chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from vsched.aio.streams import TokenLogprob
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
from vsched.api.completions import ChatEndpoint
from vsched.api.errors import ParameterRefused, out_of_bounds, shown, unsupported
from vsched.api.http_exchange import NumberedEvent
from vsched.api.request_schema import (
    AllowedTools,
    AnswerTextPart,
    CalledFunction,
    ChatRequest,
    Count,
    FramesPart,
    FunctionTool,
    ImagePart,
    InputTextPart,
    JsonSchema,
    Message,
    NamedChoice,
    NamedSchema,
    NamedTool,
    PositiveCount,
    ReasoningEffort,
    RefusalPart,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    VideoPart,
    deeper,
)
from vsched.api.response_schema import ChatLogprob
from vsched.api.unsupported import neutral, refuse_unsupported, unsupported_type, with_fields


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


class ReasoningOptions(msgspec.Struct):
    """Reasoning effort; `summary` is repeated in the response only, as reasoning is complete there."""

    effort: ReasoningEffort | None = None
    summary: str | None = None


@with_fields(
    {
        # `store` is ignored as in chat completions; the response has `store: false`.
        "access_programs background_options client_metadata context_management image": None,
        "max_tool_calls moderation prompt_cache_key prompt_cache_options": None,
        "prompt_cache_retention safety_identifier service_tier store stream_options": None,
        "background": neutral(False, remedy="stream, or wait for the answer"),
        "conversation previous_response_id": neutral(
            remedy="send the whole history as input; the server keeps nothing"
        ),
        "prompt": neutral(remedy="send its text as instructions or input"),
        "truncation": neutral("disabled", remedy="send an input that fits"),
    }
)
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

    metadata: Any = None
    reasoning: ReasoningOptions | None = None
    user: Any = None


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
    error: dict[str, str] | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Any
    parallel_tool_calls: bool
    reasoning: ReasoningOptions | None
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

    Events about the response are `response.created`, `.in_progress`, and last `.completed`, `.incomplete` or `.failed`;
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


_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}
_EVENTS = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class ResponsesFormatter(BlockFormatter[ResponsesEvent]):
    """Formats one response, which repeats settings of its request."""

    def _first_events(self) -> list[ResponsesEvent]:
        response = self._response("in_progress", [])
        return [
            ResponsesEvent(type="response.created", response=response),
            ResponsesEvent(type="response.in_progress", response=response),
        ]

    def _last_events(self) -> list[ResponsesEvent]:
        ended = self._ended()
        return [ResponsesEvent(type=f"response.{ended.status}", response=ended)]

    def _events(self, step: BlockStep) -> Iterator[ResponsesEvent]:
        block, index = step.block, step.block.index
        match step:
            case BlockStart():
                item = self._item(block, "in_progress")
                yield ResponsesEvent(
                    type="response.output_item.added", output_index=index, item=item
                )
                yield from self._part_event("added", block, self._parts(block, empty=True))
            case BlockDelta(text=text, logprobs=logprobs):
                event = self._text_event("delta", block, logprobs)
                event.delta = text
                yield event
            case BlockStop():
                event = self._text_event("done", block, block.logprobs)
                if block.kind is BlockKind.CALL:
                    event.arguments, event.name = block.text, block.name
                else:
                    event.text = block.text
                yield event
                yield from self._part_event("done", block, self._parts(block))
                item = self._ended_item(block)
                yield ResponsesEvent(
                    type="response.output_item.done", output_index=index, item=item
                )

    def _text_event(
        self, step: str, block: ContentBlock, logprobs: Sequence[TokenLogprob]
    ) -> ResponsesEvent:
        event = ResponsesEvent(
            type=f"{_EVENTS[block.kind]}.{step}", item_id=self._id(block), output_index=block.index
        )
        if block.kind is not BlockKind.CALL:
            event.content_index = 0
        if block.kind is BlockKind.TEXT:
            event.logprobs = list(map(self._format_logprob, logprobs))
        return event

    def _part_event(
        self, step: str, block: ContentBlock, parts: Sequence[OutputPart]
    ) -> Iterator[ResponsesEvent]:
        for part in parts:
            yield ResponsesEvent(
                type=f"response.content_part.{step}",
                item_id=self._id(block),
                output_index=block.index,
                content_index=0,
                part=part,
            )

    def _ended_item(self, block: ContentBlock) -> OutputItem:
        cut = self._blocks.finish_reason == "length" and block is self._blocks.blocks[-1]
        return self._item(block, "incomplete" if cut else "completed")

    def _item(self, block: ContentBlock, status: str) -> OutputItem:
        own, empty = self._id(block), status == "in_progress"
        parts = [] if empty else self._parts(block)
        match block.kind:
            case BlockKind.TEXT:
                return MessageItem(own, status, parts)
            case BlockKind.REASONING:
                return ReasoningItem(own, status, parts)
            case BlockKind.CALL:
                text = "" if empty else block.text
                return CallItem(own, status, block.call_id, block.name, text)

    def _parts(self, block: ContentBlock, *, empty: bool = False) -> list[OutputPart]:
        """The only part of a message or reasoning; a call has none."""
        match block.kind:
            case BlockKind.TEXT if not empty:
                logprobs = list(map(self._format_logprob, block.logprobs))
                return [OutputTextPart(block.text, logprobs=logprobs)]
            case BlockKind.TEXT:
                return [OutputTextPart("")]
            case BlockKind.REASONING:
                return [ReasoningPart("" if empty else block.text)]
            case BlockKind.CALL:
                return []

    def _id(self, block: ContentBlock) -> str:
        return f"{_PREFIXES[block.kind]}_{self._generation.request_id}_{block.index}"

    def _ended(self) -> ResponseObject:
        output = [self._ended_item(block) for block in self._blocks.blocks]
        if self._blocks.finish_reason != "length":
            return self._response("completed", output)
        response = self._response("incomplete", output)
        response.incomplete_details = IncompleteDetails("max_output_tokens")
        return response

    def _response(self, status: str, output: list[OutputItem]) -> ResponseObject:
        sent = self._job.original
        assert isinstance(sent, ResponsesRequest)
        has_ended = status != "in_progress"
        return ResponseObject(
            id=self._generation.request_id,
            created_at=self._job.created,
            status=status,
            model=self._job.model,
            output=output,
            usage=self._usage() if has_ended else None,
            instructions=sent.instructions,
            max_output_tokens=sent.max_output_tokens,
            metadata=sent.metadata or {},
            parallel_tool_calls=sent.parallel_tool_calls is not False,
            reasoning=sent.reasoning,
            temperature=sent.temperature,
            text=_with_format(sent.text),
            tool_choice="auto" if sent.tool_choice is None else sent.tool_choice,
            tools=sent.tools or [],
            top_logprobs=sent.top_logprobs or 0,
            top_p=sent.top_p,
            user=sent.user,
        )

    def _usage(self) -> ResponsesUsage:
        generation = self._generation
        return ResponsesUsage(
            generation.prompt_tokens,
            InputDetails(generation.cached_tokens),
            generation.output_tokens,
            OutputDetails(self._blocks.reasoning_tokens),
            generation.prompt_tokens + generation.output_tokens,
        )


class ResponsesEndpoint(ChatEndpoint):
    """Continue a conversation, with OpenAI's Responses API, without state."""

    path = "/v1/responses"
    name = "responses"
    id_prefix = "resp"
    kinds: ClassVar[dict[str, type]] = {
        "request": ResponsesRequest,
        "response": ResponseObject,
        "event": ResponsesEvent,
    }

    _formatter_class = ResponsesFormatter

    async def check(self, request: Any, request_id: str) -> CheckedRequest:
        """Convert a request to a chat request, and check it."""
        refuse_unsupported(request)
        with named_as(NAMES):
            job = await super().check(chat_request(request), request_id)
        original = msgspec.structs.replace(request, input="")
        _check_repeated(original)
        return msgspec.structs.replace(
            job,
            original=original,
            constrained_by=NAMES.get(job.constrained_by, job.constrained_by),
        )


_REPEATED_BYTES_MAX, _REPEATED_DEPTH_MAX = 1 << 20, 64
"""Maximum size and depth of the fields that the response repeats: they are held until its end, whatever waits."""


def _check_repeated(original: ResponsesRequest) -> None:
    if deeper([original.metadata, original.user], _REPEATED_DEPTH_MAX):
        message = "a field besides `input` is nested too deeply. Remedy: send flat metadata."
        raise ParameterRefused(message, param="metadata")
    size = len(msgspec.json.encode(original))
    if size > _REPEATED_BYTES_MAX:
        raise ParameterRefused.of_limit(
            "the fields besides `input`, which the response repeats, are too large",
            value=f"{size} bytes",
            limit=f"{_REPEATED_BYTES_MAX} bytes",
            remedy="send less metadata, or fewer or shorter tools",
            param="metadata",
        )


def _with_format(text: TextOptions | None) -> TextOptions:
    sent = text or TextOptions()
    return msgspec.structs.replace(sent, format=sent.format or ResponsesFormat("text"))


NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}
"""Names of chat parameters in this API."""
_DIFFERENT = frozenset({"tools", "tool_choice", "top_logprobs", "stream_options"})
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
"""Accepted values of `include`; reasoning is never encrypted, because its full text is included."""
_ITEMS = "message, function_call, function_call_output or reasoning"


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """Convert a body to a chat request.

    Raises:
        ParameterRefused: If it has content without a counterpart in chat requests.
    """
    return ChatRequest(
        messages=_messages(request),
        max_tokens=request.max_output_tokens,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        tools=[_tool(each) for each in request.tools or ()] or None,
        tool_choice=_choice(request.tool_choice),
        response_format=_format(request),
        logprobs=_wants_logprobs(request),
        top_logprobs=request.top_logprobs,
        **shared_fields(request, but=_DIFFERENT),
    )


def _wants_logprobs(request: ResponsesRequest) -> bool:
    """True if log-probabilities are requested, by `include` or `top_logprobs`.

    Raises:
        ParameterRefused: If `include` has an unsupported value.
    """
    included = request.include or ()
    for name in included:
        if name not in _INCLUDED:
            limit = " or ".join(_INCLUDED)
            raise out_of_bounds("include", value=shown(name), limit=limit, remedy="leave it out")
    return _LOGPROBS in included or bool(request.top_logprobs)


def _messages(request: ResponsesRequest) -> list[Message]:
    made: list[Message] = []
    if request.instructions:
        made.append(Message("system", request.instructions))
    if isinstance(request.input, str):
        return [*made, Message("user", request.input)]
    for index, item in enumerate(request.input):
        _append(made, item, f"input[{index}]")
    return made


def _append(made: list[Message], item: InputItem, where: str) -> None:
    """Append an item; the items of one model turn are merged into one message."""
    last = made[-1] if made and made[-1].role == "assistant" else None
    match item.type or "message":
        case "message" if item.role is not None:
            content = _content(item.content, where)
            if item.role != "assistant" or last is None or last.content or last.tool_calls:
                made.append(Message(item.role, content))
            else:
                last.content = content
        case "function_call" if item.name and item.call_id:
            call = ToolCall(CalledFunction(item.name, item.arguments or ""), item.call_id)
            if last is None:
                made.append(Message("assistant", tool_calls=[call]))
            else:
                last.tool_calls = [*(last.tool_calls or ()), call]
        case "function_call_output" if item.call_id and item.output is not None:
            content = _content(item.output, where)
            made.append(Message("tool", content, tool_call_id=item.call_id))
        case "reasoning":
            sent = item.content if isinstance(item.content, list) else item.summary
            thought = "\n".join(_text(part) for part in sent or ())
            made.append(Message("assistant", reasoning_content=thought or None))
        case "message" if item.type is None and item.content is None and item.id is not None:
            raise _unserved("item_reference", where)
        case "message" | "function_call" | "function_call_output":
            needed = (
                "a message its role, a call its call_id and name, an output its call_id and output"
            )
            message = f"`{where}` lacks a field that its type needs: {needed}. Remedy: send it."
            raise ParameterRefused(message, param=where)
        case other:
            raise _unserved(other, where)


def _unserved(kind: str, where: str) -> ParameterRefused:
    remedy = "leave out items of tools that another server runs"
    return unsupported_type(kind, where) or out_of_bounds(
        f"{where}.type", value=shown(kind), limit=_ITEMS, remedy=remedy
    )


def _content(sent: str | list[InputPart] | None, where: str) -> str | list[Any]:
    """Convert parts to content; a single text part becomes a string, which every template accepts."""
    if not isinstance(sent, list):
        return sent or ""
    if len(sent) <= 1 and not any(isinstance(part, SeenPart) for part in sent):
        return "".join(map(_text, sent))
    return _parts(sent, where)


def _parts(sent: Sequence[InputPart], where: str) -> list[Any]:
    made: list[Any] = []
    for part in sent:
        if not isinstance(part, SeenPart):
            made.append(TextPart(_text(part)))
            continue
        if not isinstance(part, InputImage):
            made.append(part)
            continue
        if part.image_url is None and part.file_id is not None:
            raise unsupported(f"{where}.content.file_id", remedy="send the image as image_url")
        made.append(ImagePart(part.image_url))
    return made


def _text(part: InputPart) -> str:
    if isinstance(part, SeenPart):
        return ""  # reasoning and calls have no images
    return part.refusal if isinstance(part, RefusalPart) else part.text


def _tool(tool: ResponsesTool) -> Tool:
    if tool.type != "function":
        return Tool(tool.type)  # the chat request is refused for it
    function = FunctionTool(tool.name or "", tool.description, tool.parameters, tool.strict)
    return Tool(function=function)


def _choice(choice: str | ResponsesToolChoice | None) -> str | ToolChoice | None:
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    if choice.type == "function" and choice.name:
        return ToolChoice("function", NamedTool(choice.name))
    if choice.type == "allowed_tools" and choice.mode and choice.tools:
        named = [NamedChoice(NamedTool(each.name)) for each in choice.tools if each.name]
        return ToolChoice("allowed_tools", allowed_tools=AllowedTools(choice.mode, named))
    return ToolChoice(choice.type)  # the chat request is refused for it


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    sent = request.text.format if request.text is not None else None
    if sent is None:
        return None
    schema = NamedSchema(sent.name, sent.description, sent.schema, sent.strict)
    return ResponseFormat(sent.type, schema if sent.type == "json_schema" else None)
