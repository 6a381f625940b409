"""Preprocessing of a text model: chat template and tokenizer. Base of the preprocessing with images.

Output is parsed with a checkpoint's `response_template`, by transformers' parser. It recognizes complete tool calls
only, so calls are not streamed. Text that it cannot parse becomes content: nothing is lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jinja2 import TemplateError

from vsched.errors import RequestRefused
from vsched.types import ModelInfo
from vsched.worker.contract import AnswerPart, Preprocessor
from vsched_workers.checkpoint.chat_templates import render_template, variables_of
from vsched_workers.checkpoint.tokenize import (
    ByteDetokenizer,
    RenderedPrompt,
    SpecialTokens,
    TokenTable,
)
from vsched_workers.checkpoint.tokenizer_files import DEFAULT_TEMPLATE

logger = logging.getLogger(__name__)

CALLS = "tool_calls"
REASONING = frozenset(["thinking", "reasoning", "reasoning_content"])
"""Field names of reasoning in templates; all other fields are content."""


class TemplateParser:
    """Parses one output; see `vsched.worker.contract.AnswerParser`."""

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """Begin after a prompt, whose end may contain the beginning of the output."""
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(
            dict(template), prefix=prompt, tools=[dict(each) for each in tools]
        )
        self._unread = ""
        self._broken = False
        self._started: set[str] = set()

    def push(self, text: str) -> list[AnswerPart]:
        """Take the next piece of the output; return the parts that are complete.

        It is parsed character by character: a failing parser returns nothing for a piece, and the result must not
        depend on how the text is split.
        """
        parts: list[AnswerPart] = []
        for at, letter in enumerate(text):
            if self._broken:
                return [*parts, AnswerPart("content", text[at:])]
            self._unread += letter
            try:
                events = self._parser.feed(letter)
            except Exception:  # noqa: BLE001 - patterns and conversions of the checkpoint
                parts += self._give_up()
            else:
                parts += self._parts(events)
        return parts

    def finish(self) -> list[AnswerPart]:
        """Return the parts that were held back."""
        if self._broken:
            return []
        try:
            _, events = self._parser.finalize()
        except Exception:  # noqa: BLE001 - as above
            return self._give_up()
        return self._parts(events)

    def _give_up(self) -> list[AnswerPart]:
        """Return the unread text as content, and treat all that follows as content."""
        logger.info("an answer does not fit the checkpoint's response_template")
        self._broken = True
        return [AnswerPart("content", self._unread)] if self._unread else []

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if field == CALLS and kind == "region_close":
                parts += self._calls(event["value"])
                self._unread = ""
            elif field != CALLS and kind == "region_chunk":
                self._unread = self._unread.partition(event["text"])[2]
                text = event["text"] if field in self._started else event["text"].lstrip()
                if text:
                    self._started.add(field)
                    reported: Literal["reasoning", "content"] = (
                        "reasoning" if field in REASONING else "content"
                    )
                    parts.append(AnswerPart(reported, text))
        return parts

    def _calls(self, value: Any) -> list[AnswerPart]:
        """Return the tool calls in a region; its text if one of them is invalid."""
        found = [_call_of(each) for each in (value if isinstance(value, list) else [value])]
        if None in found:
            return [AnswerPart("content", self._unread)]
        return [each for each in found if each is not None]


def _call_of(value: Any) -> AnswerPart | None:
    held = value.get("function", value) if isinstance(value, dict) else {}
    name, arguments = held.get("name"), held.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return AnswerPart("call", text, name)


class TextPreprocessor(Preprocessor):
    """Tokenizer and chat template of one checkpoint; images are refused.

    All methods are thread-safe: nothing changes after loading.
    """

    _placeholders: Sequence[str] = ()

    def __init__(self, info: ModelInfo, tokenizer: Any) -> None:
        self.info = info
        self._tokenizer = tokenizer
        backend = tokenizer.backend_tokenizer
        template = getattr(tokenizer, "response_template", None)
        self._response_template: dict[str, Any] = template if isinstance(template, dict) else {}
        shown = json.dumps(self._response_template, ensure_ascii=False)
        self._table = TokenTable.of_tokenizer(backend, shown=shown)
        self._special = SpecialTokens(backend, self._table.raw, info.context_tokens)

    @property
    def chat_template(self) -> str:
        """The text of the chat template, or of all of them if there are several; empty for none."""
        return "\n".join(self._templates())

    @property
    def template_variables(self) -> frozenset[str]:
        """Free variables of the chat templates, without special tokens and the arguments of rendering."""
        read = frozenset[str]().union(*map(variables_of, self._templates()))
        return read.difference(self._tokenizer.special_tokens_map)

    def _templates(self) -> list[str]:
        own = self._tokenizer.chat_template or {}
        return [own] if isinstance(own, str) else list(own.values())

    @property
    def parses_answers(self) -> bool:
        """Whether the checkpoint has a `response_template`."""
        return bool(self._response_template)

    def answer_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> TemplateParser:
        """Return the parser for the output to a prompt."""
        return TemplateParser(self._response_template, prompt, tools)

    def render(self, messages: Sequence[dict[str, Any]], **template_arguments: Any) -> str:
        """Render messages in OpenAI's format with the chat template, with one placeholder per image.

        Special tokens in messages and `tools` are text; the returned value has their positions for `tokenize`.

        Raises:
            RequestRefused: When the template rejects the messages, there is none, or their text cannot fit the context.
        """
        if not self._tokenizer.chat_template:
            raise RequestRefused(
                "this model has no chat template. "
                "Remedy: send a prompt to /v1/completions, or serve it with model.chat_template.",
                code="chat_template_missing",
            )
        tools = template_arguments.pop("tools", None)
        if tools and "tools" not in self.chat_template:
            raise RequestRefused(
                "the chat template shows no tools, so the model would not know them. "
                "Remedy: describe them in a message, or serve it with model.chat_template.",
                code="tools_not_supported",
            )
        calls = any(message.get("tool_calls") for message in messages)
        if calls and "tool_calls" not in self.chat_template:
            raise RequestRefused(
                "the chat template writes no tool calls, so the model would not see them. "
                "Remedy: put the calls into the content, or serve it with model.chat_template.",
                code="invalid_messages",
            )
        shown = [json.dumps(tools, ensure_ascii=False)] if tools else []
        self._special.check_size(*_texts(messages), *shown)
        mark = self._special.mark
        arguments = mark(template_arguments)
        if tools:
            arguments["tools"] = self._special.mark_data(tools)
        try:
            rendered = self._rendered(
                [mark(self._for_template(message)) for message in messages], **arguments
            )
        except TemplateError as error:
            raise RequestRefused(
                f"the chat template rejects the messages: {error}", code="invalid_messages"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestRefused(
                "the messages do not have the form that the chat template expects",
                code="invalid_messages",
            ) from error
        if _video_parts(messages) > self._videos_in(rendered):
            raise RequestRefused(
                "the chat template leaves out videos, so the model would not see them. "
                "Remedy: send frames as images, or serve it with model.chat_template.",
                code="videos_not_supported",
            )
        return self._special.unmark(self._with_edges(rendered))

    def _videos_in(self, rendered: str) -> int:
        """Return the number of videos in a rendered template, before its marks are removed."""
        del rendered
        return 0

    def _template_for(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        """Return the template for messages; a checkpoint may have one of its own for messages with tools."""
        del messages
        template = self._tokenizer.chat_template
        if isinstance(template, str):
            return template
        uses_tools = tools is not None and "tool_use" in template
        found: str = template["tool_use" if uses_tools else DEFAULT_TEMPLATE]
        return found

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Render messages as they are."""
        template = self._template_for(messages, arguments.get("tools"))
        special: dict[str, Any] = self._tokenizer.special_tokens_map
        defaults: dict[str, Any] = {"add_generation_prompt": True, **special}
        return render_template(template, messages, **defaults | arguments)

    def tokenize(self, text: str, *, images: bool = True) -> list[int]:
        """Return token ids; releases the GIL.

        A text that is not a rendered template gets the tokenizer's BOS tokens, such as `<s>`. Special tokens are
        recognized, except in messages. Without `images` the image placeholder is text.

        Raises:
            RequestRefused: When they exceed the context, or a stretch of text cannot be divided.
        """
        if images and not isinstance(text, RenderedPrompt):
            text = self._with_edges(text)
        return self._special.ids(text, plain=() if images else self._placeholders)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, without special tokens."""
        return self._table.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        return self._table.bytes_of(token_id)

    def detokenizer(self, *, special: bool = False) -> ByteDetokenizer:
        """Return an incremental detokenizer for one request; its text includes special tokens only with `special`."""
        return ByteDetokenizer(self._table, special=special)

    def _with_edges(self, text: str) -> str:
        """Return a text with the additions around each image in it: none here."""
        return text

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with string content: templates of text models do not support parts."""
        content = message.get("content")
        if not isinstance(content, list):
            return dict(message)
        return {**message, "content": "\n".join(part.get("text", "") for part in content)}


def is_video(part: object) -> bool:
    """Return whether a part of a message is a video."""
    return isinstance(part, Mapping) and part.get("type") == "video"


def _video_parts(messages: Sequence[Mapping[str, Any]]) -> int:
    contents = (message.get("content") for message in messages)
    return sum(
        is_video(part) for content in contents if isinstance(content, list) for part in content
    )


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text
        if thought := message.get("reasoning_content"):
            yield thought
        if calls := message.get("tool_calls"):
            yield json.dumps(calls, ensure_ascii=False)


def digest_of(*parts: bytes) -> bytes:
    """Return a digest of the settings that determine arrays: equal in every process and on every host."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()
