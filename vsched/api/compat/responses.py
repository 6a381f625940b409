"""/v1/responses, served as chat requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from vsched.aio.streams.stream import OutputDelta, TokenLogprob
from vsched.api.compat.blocks import (
    AnswerBlock,
    AnswerBlocks,
    BlockBegins,
    BlockEnds,
    BlockGrows,
    BlockKind,
    BlockStep,
)
from vsched.api.compat.fields import named_as, shared_fields
from vsched.api.compat.responses_schema import (
    InputImage,
    InputItem,
    InputPart,
    ResponsesFormat,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
    SentRefusal,
    TextOptions,
)
from vsched.api.completions import ChatEndpoint, CheckedRequest
from vsched.api.contract import Generation
from vsched.api.errors import ParameterRefused, out_of_bounds, shown, unsupported
from vsched.api.formatters import Formatter, chat_logprob
from vsched.api.http_exchange import HttpExchange, NumberedEvent
from vsched.api.request_schema import (
    AllowedTools,
    CalledFunction,
    ChatRequest,
    FunctionTool,
    ImagePart,
    Message,
    NamedChoice,
    NamedSchema,
    NamedTool,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from vsched.api.response_schema import ChatLogprob, Usage
from vsched.api.unsupported import refuse_unsupported, unsupported_type


class ResponsesEndpoint(ChatEndpoint):
    """Endpoint of OpenAI's Responses API, without state."""

    name = "responses"
    id_prefix = "resp"

    async def read(self, exchange: HttpExchange, request_id: str) -> CheckedRequest:
        """Read a request and convert it to a chat request.

        Raises:
            RequestRefused: If it cannot be served.
            ClientDisconnected: If the client disconnected before it was complete.
        """
        tokens = self._engine.info.context_tokens
        request = await self._bodies.read(exchange, ResponsesRequest, tokens=tokens)
        refuse_unsupported(request)
        with named_as(NAMES):
            job = await self.job_of(chat_request(request), request_id)
        return msgspec.structs.replace(job, requested=msgspec.structs.replace(request, input=""))

    def _formatter(self, generation: Generation, job: CheckedRequest, index: int = 0) -> Formatter:
        assert not index, "requests of this API have a single choice"
        assert isinstance(job.requested, ResponsesRequest)
        return ResponsesFormatter(
            generation,
            created=job.created,
            model=job.model,
            blocks=AnswerBlocks(
                job.wording(index) if job.wording is not None else None,
                logprobs=job.sampling.logprobs is not None,
            ),
            requested=job.requested,
            reported=partial(chat_logprob, preprocessor=self._engine.preprocessor),
        )


_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}


class ResponsesFormatter:
    """Formats one response; it repeats the settings in `requested`; `reported` formats the logprob of a token."""

    def __init__(
        self,
        generation: Generation,
        *,
        created: int,
        model: str,
        blocks: AnswerBlocks,
        requested: ResponsesRequest,
        reported: Callable[[TokenLogprob], ChatLogprob],
    ) -> None:
        self._generation = generation
        self._created = created
        self._model = model
        self._blocks = blocks
        self._requested = requested
        self._reported = reported
        self._started = False

    def chunk(self, delta: OutputDelta) -> list[NumberedEvent]:
        """Events of a delta, none without text; the first and last delta have additional ones."""
        events: list[NumberedEvent] = []
        if not self._started:
            response = self._response("in_progress", [])
            events += [
                ResponseCreated(response=response),
                ResponseInProgress(response=response),
            ]
            self._started = True
        for step in self._blocks.take(delta):
            events += self._events(step)
        if self._blocks.finish_reason:
            ended = self._ended()
            cut = ended.incomplete_details is not None
            events.append(
                ResponseIncomplete(response=ended) if cut else ResponseCompleted(response=ended)
            )
        return events

    def usage_chunk(self, usage: Usage) -> list[NumberedEvent]:
        """Return no events: the last event has the usage."""
        del usage
        return []

    def whole(self, deltas: Sequence[OutputDelta], usage: Usage) -> ResponseObject:
        """Return the response that corresponds to all events of a stream."""
        del usage
        for delta in deltas:
            self._blocks.take(delta)
        return self._ended()

    def _events(self, step: BlockStep) -> Iterator[NumberedEvent]:
        block = step.block
        is_call = block.kind is BlockKind.CALL
        own, index = self._id(block), block.index
        match step:
            case BlockBegins():
                item = self._item(block, "in_progress", [])
                yield OutputItemAdded(output_index=index, item=item)
                if not is_call:
                    yield ContentPartAdded(item_id=own, output_index=index, part=_empty_part(block))
            case BlockGrows(text=text, logprobs=logprobs):
                event = DELTAS[block.kind](item_id=own, output_index=index, delta=text)
                if isinstance(event, OutputTextDelta):
                    event.logprobs = list(map(self._reported, logprobs))
                yield event
            case BlockEnds():
                yield self._done(block)
                if not is_call:
                    yield ContentPartDone(item_id=own, output_index=index, part=self._part(block))
                yield OutputItemDone(output_index=index, item=self._ended_item(block))

    def _done(self, block: AnswerBlock) -> NumberedEvent:
        own, index, text = self._id(block), block.index, block.text
        match block.kind:
            case BlockKind.TEXT:
                logprobs = list(map(self._reported, block.logprobs))
                return OutputTextDone(item_id=own, output_index=index, text=text, logprobs=logprobs)
            case BlockKind.REASONING:
                return ReasoningDone(item_id=own, output_index=index, text=text)
            case BlockKind.CALL:
                return ArgumentsDone(
                    item_id=own, output_index=index, arguments=text, name=block.name
                )

    def _ended_item(self, block: AnswerBlock) -> OutputItem:
        cut = self._blocks.finish_reason == "length" and block is self._blocks.blocks[-1]
        parts: list[OutputPart] = [] if block.kind is BlockKind.CALL else [self._part(block)]
        return self._item(block, "incomplete" if cut else "completed", parts)

    def _item(self, block: AnswerBlock, status: str, parts: list[OutputPart]) -> OutputItem:
        own = self._id(block)
        match block.kind:
            case BlockKind.TEXT:
                return MessageItem(own, status, list(parts))
            case BlockKind.REASONING:
                return ReasoningItem(own, status, list(parts))
            case BlockKind.CALL:
                text = "" if status == "in_progress" else block.text
                return CallItem(own, status, block.call_id, block.name, text)

    def _part(self, block: AnswerBlock) -> OutputPart:
        if block.kind is BlockKind.TEXT:
            return OutputTextPart(block.text, logprobs=list(map(self._reported, block.logprobs)))
        return ReasoningPart(block.text)

    def _id(self, block: AnswerBlock) -> str:
        return f"{_PREFIXES[block.kind]}_{self._generation.request_id}_{block.index}"

    def _ended(self) -> ResponseObject:
        output = [self._ended_item(block) for block in self._blocks.blocks]
        if self._blocks.finish_reason != "length":
            return self._response("completed", output)
        response = self._response("incomplete", output)
        response.incomplete_details = IncompleteDetails("max_output_tokens")
        return response

    def _response(self, status: str, output: list[OutputItem]) -> ResponseObject:
        requested = self._requested
        has_ended = status != "in_progress"
        return ResponseObject(
            id=self._generation.request_id,
            created_at=self._created,
            status=status,
            model=self._model,
            output=output,
            usage=self._usage() if has_ended else None,
            instructions=requested.instructions,
            max_output_tokens=requested.max_output_tokens,
            metadata=requested.metadata or {},
            parallel_tool_calls=requested.parallel_tool_calls is not False,
            reasoning=requested.reasoning,
            temperature=requested.temperature,
            text=_with_format(requested.text),
            tool_choice="auto" if requested.tool_choice is None else requested.tool_choice,
            tools=requested.tools or [],
            top_logprobs=requested.top_logprobs or 0,
            top_p=requested.top_p,
            user=requested.user,
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


def _with_format(text: TextOptions | None) -> TextOptions:
    sent = text or TextOptions()
    return msgspec.structs.replace(sent, format=sent.format or ResponsesFormat("text"))


def _empty_part(block: AnswerBlock) -> OutputPart:
    is_text = block.kind is BlockKind.TEXT
    return OutputTextPart("") if is_text else ReasoningPart("")


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
        tools=[_tool(each) for each in request.tools or ()] or None,
        tool_choice=_choice(request.tool_choice),
        response_format=_format(request),
        logprobs=_tells_logprobs(request),
        top_logprobs=request.top_logprobs,
        **shared_fields(request, but=_DIFFERENT),
    )


def _tells_logprobs(request: ResponsesRequest) -> bool:
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
    if len(sent) <= 1 and not any(isinstance(part, InputImage) for part in sent):
        return "".join(map(_text, sent))
    return _parts(sent, where)


def _parts(sent: Sequence[InputPart], where: str) -> list[TextPart | ImagePart]:
    made: list[TextPart | ImagePart] = []
    for part in sent:
        if not isinstance(part, InputImage):
            made.append(TextPart(_text(part)))
            continue
        if part.image_url is None:
            raise unsupported(f"{where}.content.file_id", remedy="send the image as image_url")
        made.append(ImagePart(part.image_url))
    return made


def _text(part: InputPart) -> str:
    if isinstance(part, InputImage):
        return ""  # reasoning and calls have no images
    return part.refusal if isinstance(part, SentRefusal) else part.text


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
    requested = request.text.format if request.text is not None else None
    if requested is None:
        return None
    schema = NamedSchema(requested.name, requested.description, requested.schema, requested.strict)
    return ResponseFormat(requested.type, schema if requested.type == "json_schema" else None)
