"""Convert messages of a body to the format of chat templates, and extract their images and videos."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from vsched.api.errors import ParameterRefused, out_of_bounds
from vsched.api.request_schema import (
    NAME,
    EmbedsFile,
    FramesPart,
    ImageArea,
    ImageEmbedsPart,
    ImagePart,
    ImageUrl,
    MediaArguments,
    Message,
    ProcessorArguments,
    RedactedThinkingPart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolCall,
    VideoEmbedsPart,
    VideoOptions,
    VideoPart,
    VideoProcessing,
    VideoUrl,
    deeper,
)
from vsched.media import ImageReference, MediaReference, frames_of, scheme_of
from vsched.types import Spans
from vsched.worker.contract import PixelBounds, VideoSampling

MESSAGES_MAX = 1024
PARTS_MAX = 4096
"""Maximum content parts and tool calls of a request, over all its messages."""
_ROLES = {"developer": "system", "function": "tool"}
"""Role names of chat templates for OpenAI's newer and deprecated roles."""


def split_messages(
    messages: Sequence[Message],
    processing: ProcessorArguments | None = None,
    media: MediaArguments | None = None,
) -> tuple[list[dict[str, Any]], list[ImageReference]]:
    """Convert messages for the chat template, with placeholders for images and videos, and list these in order.

    `processing` has the default pixel bounds of images without their own, and the default sampling of videos, as
    `media` has.

    Raises:
        ParameterRefused: If there are too many messages or parts, or one is not supported.
    """
    if not 0 < len(messages) <= MESSAGES_MAX:
        raise out_of_bounds(
            "messages",
            value=f"{len(messages)} messages",
            limit=f"1 to {MESSAGES_MAX} messages",
            remedy="send that many",
        )
    for message in messages:
        if message.function_call is not None and not message.tool_calls:
            message.tool_calls = [ToolCall(message.function_call)]
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    parts += sum(len(message.tool_calls or ()) for message in messages)
    if parts > PARTS_MAX:
        raise out_of_bounds(
            "messages",
            value=f"{parts} content parts and tool calls",
            limit=f"{PARTS_MAX} content parts",
            remedy="send fewer",
        )
    check_arguments(messages)
    given = [each for each in (processing, media and media.video) if each]
    defaults = _sampling(given, _bounds(processing))
    images: list[ImageReference] = []
    rendered: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role = _ROLES.get(message.role, message.role)
        made: dict[str, Any] = {"role": role, "content": _content(message, images, defaults)}
        if message.tool_calls:
            if role != "assistant":
                raise out_of_bounds(
                    f"messages[{index}].tool_calls",
                    value=f"role {message.role}",
                    limit="role assistant",
                    remedy="send tool calls in the assistant message that made them",
                )
            # `with_template_calls` decodes them, perhaps in a thread.
            made["tool_calls"] = message.tool_calls
        thought = message.reasoning_content or message.reasoning or _thought(message) or None
        if role == "assistant" and isinstance(thought, str):
            made["reasoning_content"] = thought
        if role == "tool":
            answered = {"tool_call_id": message.tool_call_id, "name": message.name}
            made |= {key: value for key, value in answered.items() if value is not None}
        rendered.append(made)
    return rendered, images


def _content(
    message: Message, images: list[ImageReference], defaults: VideoSampling
) -> str | list[dict[str, str]]:
    if message.content is None:
        return message.refusal if isinstance(message.refusal, str) else ""
    if isinstance(message.content, str):
        return message.content
    content: list[dict[str, str]] = []
    for part in message.content:
        match part:
            case TextPart(text=text) | RefusalPart(refusal=text):
                content.append({"type": "text", "text": text})
            case ThinkingPart(thinking=text):
                if message.role != "assistant":  # `_thought` returns the assistant's
                    content.append({"type": "text", "text": text})
            case RedactedThinkingPart():
                pass
            case ImageEmbedsPart():
                source = _embeds(part.image_embeds, "image_embeds")
                attention = _attention(part)
                images.append(MediaReference(source, is_embedded=True, attention=attention))
                content.append({"type": "image"})
            case VideoEmbedsPart():
                source = _embeds(part.video_embeds, "video_embeds")
                images.append(
                    MediaReference(
                        source, is_video=True, is_embedded=True, attention=_attention(part)
                    )
                )
                content.append({"type": "video"})
            case ImagePart():
                images.append(_image(part, defaults.bounds))
                content.append({"type": "image"})
            case VideoPart() | FramesPart():
                images.append(_video(part, defaults))
                content.append({"type": "video"})
    return content


def _thought(message: Message) -> str:
    parts = message.content if isinstance(message.content, list) else []
    return "\n".join(part.thinking for part in parts if isinstance(part, ThinkingPart))


def _bounds(processing: ProcessorArguments | None) -> PixelBounds:
    sent = processing or ProcessorArguments()
    size = sent.size or ImageArea()
    return _first_bounds(sent, PixelBounds(size.shortest_edge, size.longest_edge))


def _first_bounds(*given: PixelBounds | VideoProcessing | ImagePart) -> PixelBounds:
    """Return the first minimum and the first maximum."""
    least = next((one.min_pixels for one in given if one.min_pixels is not None), None)
    most = next((one.max_pixels for one in given if one.max_pixels is not None), None)
    return PixelBounds(least, most)


def _image(part: ImagePart, bounds: PixelBounds) -> MediaReference:
    """Reference to an image with its own pixel bounds, or those of the request."""
    url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
    if url is None and part.uuid is None:
        message = "`image_url` is missing. Remedy: send it, or the uuid of an image sent before."
        raise ParameterRefused(message, param="image_url")
    found = _first_bounds(part, bounds)
    return MediaReference(
        url if part.uuid is None else url or None,
        uuid=part.uuid,
        bounds=None if found == PixelBounds() else found,
        attention=_attention(part),
    )


def _attention(
    part: ImagePart | ImageEmbedsPart | VideoEmbedsPart | VideoPart | FramesPart,
) -> Spans | None:
    return None if part.attention_spans is None else tuple(part.attention_spans)


def _sampling(given: Sequence[VideoOptions | VideoSampling], bounds: PixelBounds) -> VideoSampling:
    """Sampling by the first of several options: the first with a rate or a number, and the first maximum."""
    exact = next((one for one in given if one.fps is not None or one.num_frames is not None), None)
    most = next((one.max_frames for one in given if one.max_frames is not None), None)
    if exact is None:
        return VideoSampling(None, None, most, bounds)
    return VideoSampling(exact.fps, exact.num_frames, most, bounds)


def _video(part: VideoPart | FramesPart, defaults: VideoSampling) -> MediaReference:
    """Reference to a video with its own options; missing ones are from the request."""
    given: list[VideoProcessing] = [part]
    if isinstance(part, FramesPart):
        source = part.video if isinstance(part.video, str) else tuple(part.video)
    elif isinstance(part.video_url, VideoUrl):
        source = part.video_url.url
        given.append(part.video_url)
    else:
        source = part.video_url
    if isinstance(source, str):
        source = frames_of(source) or source
    bounds = _first_bounds(*given, defaults.bounds)
    return MediaReference(
        source,
        is_video=True,
        sampling=_sampling([*given, defaults], bounds),
        attention=_attention(part),
    )


def _embeds(file: EmbedsFile, param: str) -> str:
    """Source of embeddings; base64 never looks like a URL."""
    if bool(file.data) == bool(file.url):
        message = (
            f"`{param}` needs either data or url. Remedy: send base64 as data, or a URL as url."
        )
        raise ParameterRefused(message, param=param)
    if file.url and not scheme_of(file.url):
        message = f"`{param}.url` is not a URL. Remedy: send a data:, file: or https: URL as url."
        raise ParameterRefused(message, param=param)
    return file.data or file.url


ARGUMENTS_CHARACTERS_MAX = 1024 * 1024
"""Maximum characters of all argument texts in one request, which limits the time to decode their JSON."""
_OBJECT_CHARACTERS = 16_384
"""Characters that an argument object counts as: its size was limited when the body was read."""
_DEPTH_MAX = 32
INVALID_JSON = "INVALID_JSON"
"""The single argument of a call whose arguments are not a JSON object, such as truncated ones, as Anthropic advises."""


def arguments_characters(calls: Sequence[ToolCall]) -> int:
    """Number of characters in the arguments of these calls."""
    sent = [call.function.arguments or "" for call in calls]
    return sum(len(each) if isinstance(each, str) else _OBJECT_CHARACTERS for each in sent)


def check_arguments(messages: Sequence[Message]) -> None:
    """Reject calls whose arguments would take long to decode.

    Raises:
        ParameterRefused: With the limit.
    """
    characters = sum(arguments_characters(message.tool_calls or ()) for message in messages)
    if characters > ARGUMENTS_CHARACTERS_MAX:
        raise out_of_bounds(
            "messages",
            value=f"{characters} characters of arguments",
            limit=f"{ARGUMENTS_CHARACTERS_MAX} characters of arguments",
            remedy="send fewer calls, or shorten their arguments",
        )


def with_template_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert the tool calls of messages for chat templates.

    Blocks: while arguments are decoded; call it off the event loop for long ones.

    Raises:
        ParameterRefused: If a name is invalid, or arguments are nested too deeply; names the call.
    """
    return [
        {**message, "tool_calls": _calls(message["tool_calls"], f"messages[{index}].tool_calls")}
        if "tool_calls" in message
        else message
        for index, message in enumerate(messages)
    ]


def _calls(calls: Sequence[ToolCall], param: str) -> list[dict[str, Any]]:
    """Convert calls so that arguments are objects: templates write them as JSON, and would quote a string again."""
    found: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        where = f"{param}[{index}].function"
        name = call.function.name
        if re.fullmatch(NAME, name, re.ASCII) is None:
            raise out_of_bounds(
                f"{where}.name",
                value=f"a text of {len(name)} characters",
                limit="1 to 128 letters, digits and _ . : / -",
                remedy="send the name of the function",
            )
        arguments = _arguments(call.function.arguments, f"{where}.arguments")
        function = {"name": name, "arguments": arguments}
        found.append({"id": call.id or "", "type": "function", "function": function})
    return found


def _arguments(sent: str | dict[str, Any] | None, param: str) -> dict[str, Any]:
    found = sent if isinstance(sent, dict) else as_object(sent or "")
    if deeper(found, _DEPTH_MAX):
        raise out_of_bounds(
            param,
            value=f"a text of {len(sent)} characters" if isinstance(sent, str) else "an object",
            limit=f"one JSON object, nested at most {_DEPTH_MAX} deep",
            remedy="send the arguments of the model's call unchanged",
        )
    return found


def as_object(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; text that is not a JSON object becomes the argument `INVALID_JSON`."""
    try:
        found = msgspec.json.decode(arguments.strip() or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = arguments
    if found is None:
        return {}
    return found if isinstance(found, dict) else {INVALID_JSON: arguments}
