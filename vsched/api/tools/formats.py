"""The forms in which models write calls and reasoning: a table, and how a chat template's text tells which is its.

What a template writes into histories is what its model was trained to write. The same literals make the grammar of a
forced call and what recognises a free one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

NAME = r"[\w.:/-]{1,128}"
GAP = r"\s{0,8}"
"""Blanks between the parts of a call: bounded, so that it is known where what comes before its arguments ends."""
_CALL_ID = r"(?:\[CALL_ID\]\w{1,32})?"
"""Behind the name, from some models of Mistral; clients get an id of ours."""


class TaggedArguments(msgspec.Struct, frozen=True):
    """Arguments one after the other: `before`, a name, `middle`, a value, `after`. Texts have no quotes."""

    before: str
    middle: str
    after: str

    @property
    def lead(self) -> str:
        """The blanks that stand before a value and are none of it."""
        return self.middle[len(self.middle.rstrip()) :]

    @property
    def key(self) -> re.Pattern[str]:
        """What stands before a value, with the name of the argument."""
        before, middle = _with_gaps(self.before), _with_gaps(self.middle.rstrip())
        return re.compile(rf"{before}(?P<name>[^<>]{{1,256}}){middle}")


class ValueArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments with a comma between them, as keys and values in a notation that is not JSON.

    Attributes:
        opening, closing: The brackets around the arguments.
        assign: What stands between an argument's name and its value.
        comma, colon: What stands between values, and between keys and values in them.
        quotes: What texts stand between, with escapes.
        raw_quotes: What texts stand between that have no escapes; the first of all is the one that models write.
        bare_keys: Keys in values have no quotes.
        words: What stands for true, false and null.
        begin: A pattern of how arguments begin.
    """

    opening: str
    closing: str
    assign: str
    comma: str
    colon: str
    quotes: tuple[str, ...]
    raw_quotes: tuple[str, ...] = ()
    bare_keys: bool = False
    words: tuple[str, str, str] = ("true", "false", "null")
    begin: str = ""


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes calls: `opening`, `first`, `before`, the name, `middle`, the arguments, `after`, `closing`.

    Attributes:
        marks: Texts that stand together in the chat templates of such models.
        unlike: Texts that stand in the templates of others with the same marks.
        opening: What calls begin with; empty where an answer is either calls or text.
        first: What stands between the opening and its first call.
        before, middle, after: What stands around the name and the arguments of one call.
        closing: What stands behind the last call of an opening.
        between: What stands between two calls.
        shared: Several calls stand behind one opening, else each has its own.
        alone: An answer has one call at most.
        arguments: How arguments are written; JSON without it.
        openings: What else calls begin with.
        between_parts: A pattern of what may stand instead of `middle`.
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
        """Whether a call is one JSON object, which holds the name and the arguments."""
        return self.arguments is None and self.before.endswith('"')

    @property
    def head(self) -> re.Pattern[str]:
        """What stands before the arguments, with the name; blanks may differ."""
        before, middle = _with_gaps(self.before), _with_gaps(self.middle)
        middle = f"(?:{self.between_parts or middle})"
        pattern = rf"{GAP}{before}(?P<name>{NAME}){_CALL_ID}{middle}{GAP}{self._begin}"
        return re.compile(pattern, re.ASCII)

    @property
    def _begin(self) -> str:
        """A pattern of what arguments begin with, by which the end of a name is known."""
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
    """How a model marks what it thinks before it answers.

    Attributes:
        begin, end: What stands around a thought.
        frames: What stands around the other parts of an answer, and is none of it.
        again: An answer may hold several thoughts.
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
            colon=": ",
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
            colon=":",
            quotes=('"',),
            raw_quotes=('<|"|>',),
            bare_keys=True,
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
"""By name; of those that a template is like, the first holds."""

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
"""By name; of those of which a template has a mark, the first holds."""


def call_format(name: str, template: str) -> CallFormat | None:
    """Return the form of this name, or for `auto` that which a chat template writes; None where it is not known."""
    if name != "auto":
        return CALL_FORMATS.get(name)
    for known in CALL_FORMATS.values():
        like = all(mark in template for mark in known.marks)
        if like and not any(mark in template for mark in known.unlike):
            return known
    return None


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return the form of this name, or for `auto` that of the model of a chat template; None where it has none."""
    if name != "auto":
        return REASONING_FORMATS.get(name)
    return next((each for each in REASONING_FORMATS.values() if _thinks(each, template)), None)


def _thinks(known: ReasoningFormat, template: str) -> bool:
    """Return whether a template writes a mark of this form; one that also ends other things tells nothing."""
    if known.end in known.frames:
        return known.begin.partition("<|message|>")[0] in template
    return known.begin.strip() in template or known.end in template
