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

    @property
    def is_object(self) -> bool:
        """Whether a call is one JSON object, which holds the name and the arguments."""
        return self.before.endswith('"')

    @property
    def head(self) -> re.Pattern[str]:
        """What stands before the arguments, with the name; blanks may differ."""
        before, middle = _with_gaps(self.before), _with_gaps(self.middle)
        pattern = rf"{GAP}{before}(?P<name>{NAME}){_CALL_ID}{middle}{GAP}(?=\{{)"
        return re.compile(pattern, re.ASCII)


def _with_gaps(literal: str) -> str:
    return GAP.join(map(re.escape, re.split(r"\s+", literal)))


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a model marks what it thinks before it answers."""

    begin: str
    end: str


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
}
"""By name; of those that a template is like, the first holds."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
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
    known = REASONING_FORMATS.values()
    return next((each for each in known if each.begin in template or each.end in template), None)
