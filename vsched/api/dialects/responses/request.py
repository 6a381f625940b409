"""Conversion of /v1/responses bodies to chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vsched.api.dialects.fields import shared_fields
from vsched.api.dialects.responses.schema import (
    InputImage,
    InputItem,
    InputPart,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
    SentRefusal,
)
from vsched.api.errors import ParameterRefused, out_of_bounds, shown, unsupported
from vsched.api.fields.unserved import unsupported_type
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
