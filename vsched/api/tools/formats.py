"""Table of tool-call and reasoning formats, and their detection from a chat template's text.

A model was trained to write calls as its template writes them into histories. The same literals are used for the
grammar of forced calls and for parsing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from vsched.api.request_schema import NAME

GAP = r"\s{0,8}"
"""Whitespace between the parts of a call: limited, so that the length of its head is limited."""
_CALL_ID = r"(?:\[CALL_ID\]\w{1,32})?"
"""After the name, in some Mistral models; clients get an id of vsched instead."""


class TaggedArguments(msgspec.Struct, frozen=True):
    """Consecutive arguments: `before`, a name, `middle`, a value, `after`. Strings have no quotes."""

    before: str
    middle: str
    after: str

    @property
    def lead(self) -> str:
        """Whitespace before a value that is not part of it."""
        return self.middle[len(self.middle.rstrip()) :]

    @property
    def key(self) -> re.Pattern[str]:
        """Pattern of the text before a value, with the name of the argument."""
        before, middle = _with_gaps(self.before), _with_gaps(self.middle.rstrip())
        return re.compile(rf"{before}(?P<name>[^<>]{{1,256}}){middle}")


class ValueArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Comma-separated arguments, as keys and values in a notation other than JSON.

    Attributes:
        opening, closing: Brackets around the arguments.
        assign: Separator between an argument's name and its value.
        comma: Separator between arguments.
        quotes: Quotes of strings with escapes.
        raw_quotes: Quotes of strings without escapes; models write the first one.
        words: Constants for true, false and null.
        begin: Pattern of the beginning of the arguments.
    """

    opening: str
    closing: str
    assign: str
    comma: str
    quotes: tuple[str, ...]
    raw_quotes: tuple[str, ...] = ()
    words: tuple[str, str, str] = ("true", "false", "null")
    begin: str = ""


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Tool-call format: `opening`, `first`, `before`, the name, `middle`, the arguments, `after`, `closing`.

    Attributes:
        marks: Texts that all occur in the chat templates of such models.
        unlike: Texts that occur in templates of other formats with the same marks.
        opening: Start of calls; empty if an answer is either calls or text.
        first: Text between the opening and its first call.
        before, middle, after: Text around the name and the arguments of one call.
        closing: Text after the last call of an opening.
        between: Text between two calls.
        shared: Several calls share one opening; otherwise each has its own.
        alone: An answer has at most one call.
        arguments: Format of the arguments; JSON if None.
        openings: Alternative starts of calls.
        between_parts: Pattern of alternatives to `middle`.
    """

    marks: tuple[str, ...]
    unlike: tuple[str, ...] = ()
    opening: str
    first: str = ""
    before: str
    middle: str
    after: str = ""
    closing: str = ""
    between: str = ""
    shared: bool = False
    alone: bool = False
    arguments: TaggedArguments | ValueArguments | None = None
    openings: tuple[str, ...] = ()
    between_parts: str = ""

    @property
    def is_object(self) -> bool:
        """True if a call is one JSON object with the name and the arguments."""
        return self.arguments is None and self.before.endswith('"')

    @property
    def head(self) -> re.Pattern[str]:
        """Pattern of the text before the arguments, with the name; whitespace may differ."""
        before, middle = _with_gaps(self.before), _with_gaps(self.middle)
        middle = f"(?:{self.between_parts or middle})"
        pattern = rf"{GAP}{before}(?P<name>{NAME}){_CALL_ID}{middle}{GAP}{self._arguments_start}"
        return re.compile(pattern, re.ASCII)

    @property
    def _arguments_start(self) -> str:
        """Pattern of the beginning of arguments, which ends the name."""
        match self.arguments:
            case TaggedArguments(before=before):
                ends = [before, *self.after.split(), *self.closing.split()]
                return f"(?={'|'.join(map(re.escape, ends))})"
            case ValueArguments(opening=opening, begin=begin):
                return re.escape(opening) + begin
        return r"(?=\{)"


def _with_gaps(literal: str) -> str:
    return GAP.join(map(re.escape, re.split(r"\s+", literal)))


class ReasoningFormat(msgspec.Struct, frozen=True):
    """Reasoning format: the markers around reasoning.

    Attributes:
        begin, end: Markers around reasoning.
        frames: Markers around the other parts of an answer, which are dropped.
        again: An answer may have several reasoning sections.
    """

    begin: str
    end: str
    frames: tuple[str, ...] = ()
    again: bool = False


CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        marks=("<tool_call>",),
        unlike=("<function=", "<arg_key>"),
        opening="<tool_call>",
        before='\n{"name": "',
        middle='", "arguments": ',
        after="}\n",
        closing="</tool_call>",
        between="\n",
    ),
    "deepseek": CallFormat(
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        opening="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
        between="\n",
        shared=True,
    ),
    "deepseek-v3.1": CallFormat(
        marks=("<｜tool▁calls▁begin｜>",),
        opening="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
        shared=True,
    ),
    "mistral": CallFormat(
        marks=("[TOOL_CALLS]", "[ARGS]"),
        opening="[TOOL_CALLS]",
        before="",
        middle="[ARGS]",
    ),
    "mistral-list": CallFormat(
        marks=("[TOOL_CALLS]",),
        opening="[TOOL_CALLS]",
        first="[",
        before='{"name": "',
        middle='", "arguments": ',
        after="}",
        closing="]",
        between=", ",
        shared=True,
    ),
    "llama-json": CallFormat(
        marks=('{"name": function name, "parameters":',),
        opening="",
        before='{"name": "',
        middle='", "parameters": ',
        after="}",
        between="; ",
        shared=True,
    ),
    "pythonic": CallFormat(
        marks=("[func_name1(",),
        opening="",
        first="[",
        before="",
        middle="",
        closing="]",
        between=", ",
        shared=True,
        arguments=ValueArguments(
            opening="(",
            closing=")",
            assign="=",
            comma=", ",
            quotes=('"""', "'''", '"', "'"),
            words=("True", "False", "None"),
            begin=r"(?=\s*(?:\)|[^=\s()\[\]'\"]+\s*=))",
        ),
    ),
    "qwen3-coder": CallFormat(
        marks=("<tool_call>", "<function=", "<parameter="),
        opening="<tool_call>",
        before="\n<function=",
        middle=">\n",
        after="</function>\n",
        closing="</tool_call>",
        between="\n",
        arguments=TaggedArguments("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "glm": CallFormat(
        marks=("<tool_call>", "<arg_key>"),
        opening="<tool_call>",
        before="",
        middle="\n",
        closing="</tool_call>",
        between="\n",
        arguments=TaggedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "minimax": CallFormat(
        marks=("<minimax:tool_call>",),
        opening="<minimax:tool_call>",
        before='\n<invoke name="',
        middle='">\n',
        after="</invoke>",
        closing="\n</minimax:tool_call>",
        shared=True,
        arguments=TaggedArguments('<parameter name="', '">', "</parameter>\n"),
    ),
    "gemma4": CallFormat(
        marks=("<|tool_call>", '<|"|>'),
        opening="<|tool_call>",
        before="call:",
        middle="",
        closing="<tool_call|>",
        arguments=ValueArguments(
            opening="{",
            closing="}",
            assign=":",
            comma=",",
            quotes=('"',),
            raw_quotes=('<|"|>',),
        ),
    ),
    "harmony": CallFormat(
        marks=("<|channel|>", "to=functions."),
        opening="<|channel|>commentary to=functions.",
        before="",
        middle=" <|constrain|>json<|message|>",
        closing="<|call|>",
        alone=True,
        openings=("<|channel|>analysis to=functions.", " to=functions."),
        between_parts=r"(?:<\|channel\|>(?:commentary|analysis))?\s?(?:<\|constrain\|>)?(?:json)?<\|message\|>",
    ),
}
"""Formats by name; if a template matches several, the first one is used."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>", again=True),
    "harmony": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        frames=(
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|channel|>commentary<|message|>",
            "<|end|>",
        ),
        again=True,
    ),
}
"""Formats by name; if a template has markers of several, the first one is used."""


def call_format(name: str, template: str) -> CallFormat | None:
    """Format of this name, or for `auto` the format of a chat template; None if it is unknown."""
    if name != "auto":
        return CALL_FORMATS.get(name)
    for known in CALL_FORMATS.values():
        like = all(mark in template for mark in known.marks)
        if like and not any(mark in template for mark in known.unlike):
            return known
    return None


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Format of this name, or for `auto` the format of a chat template; None if it has none."""
    if name != "auto":
        return REASONING_FORMATS.get(name)
    return next((each for each in REASONING_FORMATS.values() if _thinks(each, template)), None)


def _thinks(known: ReasoningFormat, template: str) -> bool:
    """True if a template has a marker of this format; end markers with other uses do not count."""
    if known.end in known.frames:
        return known.begin.partition("<|message|>")[0] in template
    return known.begin.strip() in template or known.end in template
