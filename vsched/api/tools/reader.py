"""Incremental parser of a model's output: content, reasoning and tool calls.

The parser is a state machine over the text only. Text is emitted once no continuation could change its meaning, so the
resulting message does not depend on the chunking, streamed or not. No character is lost: an apparent call that turns
out not to be one is content, and so is text after the arguments that does not belong to the call. If the output was
truncated, or must be a call, a possible start of a call at its end is dropped, so that clients see no markup.

The name of a call precedes its arguments, so the arguments are streamed. They end at the closing bracket of their
object; as in OpenAI's API, clients have to check whether they are valid JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import UNSET

from vsched.api.request_schema import NAME
from vsched.api.response_schema import (
    ChatDelta,
    ChatMessage,
    FunctionOutput,
    ToolCallDelta,
    ToolCallOutput,
)
from vsched.api.tools.arguments import JsonScan, TaggedScan, ValueScan, first_mark, longest_overlap
from vsched.api.tools.formats import CallFormat, ReasoningFormat, TaggedArguments, ValueArguments
from vsched.worker.contract import AnswerParser, AnswerPart

HEAD_CHARACTERS_MAX = 512
"""Maximum length of a call's head, including whitespace: a longer one is not a call."""
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id", "function"})
"""An object that begins with another key is not a call, so a JSON answer is not held back until its end."""

_HALF = "\N{REPLACEMENT CHARACTER}"
"""Text of an incomplete character, which may occur within the markers of DeepSeek's calls."""

_TYPED = '{"type":"function"'
"""The beginning of a call object with a type."""


class OutputParser:
    """Parses one choice.

    `tools` has the argument schemas by name: in formats without an opening, a call is recognized only by such a name.
    With `forced`, the output must consist of calls; with `thinking`, the prompt has begun the reasoning.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        *,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        forced: bool = False,
        reasoning: ReasoningFormat | None = None,
        thinking: bool = False,
    ) -> None:
        self._format = calls
        self._head_pattern = calls.head if calls is not None else None
        self._reasoning = reasoning
        self._thinking = thinking
        self._parted = False
        self._tools = tools or {}
        self._openings = _openings(calls)
        self._frames = reasoning.frames if reasoning is not None else ()
        thoughts = (reasoning.begin,) if reasoning is not None and reasoning.again else ()
        self._marks = (*self._openings, *self._frames, *thoughts)
        self._forced = forced
        self._calls = 0
        self._buffer = ""
        self._half = ""
        self._scan = JsonScan()
        self._arguments_scan: JsonScan | TaggedScan | ValueScan = self._scan
        self._scanned = 0
        self._opened = 0
        self._tail: list[str] = []
        self._leading = True
        self._blanks = ""
        self._ended = False
        self._cut = False
        self._parts: list[AnswerPart] = []
        self._state: Callable[[], bool] = (
            self._before_thought if reasoning is not None else self._answer
        )

    def push(self, text: str) -> list[AnswerPart]:
        """Process the next piece of the output; return the parts that are certain."""
        text = self._half + text
        whole = text.rstrip(_HALF)
        self._half = text[len(whole) :]
        self._buffer += whole
        parts = self._run_states()
        # With text in the buffer, the incomplete character may belong to a marker: wait for the next piece.
        if self._half and not self._buffer:
            self._buffer, self._half = self._half, ""
            parts += self._run_states()
        return parts

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        """Return the parts held back; if the output was truncated, drop a possible start of a call or marker."""
        self._ended = True
        self._cut = cut or self._forced
        if not self._cut:
            self._buffer, self._half = self._buffer + self._half, ""
        parts = self._run_states()
        if self._leading and self._blanks and not (self._parted or self._buffer or self._forced):
            parts.append(AnswerPart("content", self._blanks))
        return parts

    @property
    def has_open_call(self) -> bool:
        """True if the arguments of the last call in the output are incomplete."""
        return self._state == self._arguments

    def _run_states(self) -> list[AnswerPart]:
        while self._buffer and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    # Each state consumes certain text from the buffer, and returns True if there may be more to consume.

    def _before_thought(self) -> bool:
        """At the start: reasoning, or content if the prompt did not begin the reasoning."""
        assert self._reasoning is not None
        stripped = self._buffer.lstrip()
        begin = self._reasoning.begin
        may_begin = len(stripped) < len(begin) and begin.startswith(stripped)
        if may_begin and (not self._ended or (self._cut and stripped)):
            return False
        self._state = self._answer
        if stripped.startswith(begin):
            self._consume_text(len(self._buffer) - len(stripped) + len(begin))
            self._thinking = True
        if self._thinking:
            self._state = self._thought
        return True

    def _thought(self) -> bool:
        """In reasoning, up to its end marker; surrounding whitespace is dropped."""
        assert self._reasoning is not None
        end = self._reasoning.end
        at = self._buffer.find(end)
        held = 0 if at >= 0 else self._held((end,))
        text = self._buffer[: at if at >= 0 else len(self._buffer) - held]
        if not self._parted:
            self._consume_text(len(text) - len(text.lstrip()))
            text = text.lstrip()
        if said := text.rstrip():
            self._parted = True
            self._parts.append(AnswerPart("reasoning", self._consume_text(len(said))))
        if at < 0:
            return False
        self._consume_text(len(text) - len(said) + len(end))
        self._parted = True
        self._state = self._answer
        return True

    def _answer(self) -> bool:
        """After reasoning."""
        bare = self._format is not None and not self._format.opening
        self._state = self._bare if bare else self._text
        return True

    def _plain(self) -> bool:
        """In content that cannot contain calls."""
        self._say(self._consume_text(len(self._buffer)))
        return False

    def _text(self) -> bool:
        """In content, up to the start of calls or a frame marker."""
        if not self._marks:
            return self._plain()
        at, mark = first_mark(self._buffer, self._marks)
        if at < 0:
            held = self._held(self._marks)
            self._say(self._consume_text(len(self._buffer) - held))
            return False
        self._say(self._consume_text(at))
        if mark in self._openings:
            self._opened = len(mark)
            self._state = self._first
        else:
            self._consume_text(len(mark))
            if mark not in self._frames:
                self._state = self._thought
        return True

    def _bare(self) -> bool:
        """At the start of an answer in a format without an opening: the first character decides if it may be a call."""
        assert self._format is not None
        stripped = self._buffer.lstrip()
        if not stripped and not self._ended:
            return False
        self._opened = 0
        if stripped.startswith((self._format.first or self._format.before)[0]):
            self._state = self._first
        else:
            self._state = self._plain
        return True

    def _first(self) -> bool:
        """Between the opening and its first call."""
        assert self._format is not None
        rest, first = self._buffer[self._opened :].lstrip(), self._format.first
        if rest.startswith(first):
            if first:
                self._opened = len(self._buffer) - len(rest) + len(first)
            self._begin_head()
            return True
        return self._undecided() if first.startswith(rest) else self._is_content()

    def _begin_head(self) -> None:
        self._scan, self._scanned = JsonScan(), self._opened
        self._state = self._head

    def _head(self) -> bool:
        """At the text before arguments, including a separate opening."""
        assert self._format is not None
        assert self._head_pattern is not None
        head = self._head_pattern.match(self._buffer, self._opened)
        if head is not None and self._is_tool(head["name"]):
            self._begin_call(head["name"])
            self._consume_text(head.end())
            self._arguments_scan = _scan_of(self._format, self._tools.get(head["name"], {}))
            self._state = self._arguments
            return True
        if not self._format.is_object:
            is_long = len(self._buffer) > self._opened + HEAD_CHARACTERS_MAX
            return self._is_content() if is_long else self._undecided()
        return self._object()

    def _object(self) -> bool:
        """In a call object with another order of keys, which is parsed when complete."""
        start = len(self._buffer) - len(self._buffer[self._opened :].lstrip())
        if start == len(self._buffer):
            return self._undecided()
        if self._buffer[start : start + 1] != "{":
            return self._is_content()
        key = _FIRST_KEY.match(self._buffer, start)
        if key is not None and key[1] not in _CALL_KEYS:
            return self._is_content()
        end = self._scan.find_end(self._buffer, self._scanned)
        self._scanned = len(self._buffer)
        call = _call_of(self._buffer[start:end]) if end >= 0 else None
        if end < 0:
            return self._undecided() if self._ended else False
        if call is None or not self._is_tool(call[0]):
            return self._is_content()
        name, arguments = call
        self._begin_call(name, arguments)
        self._consume_text(end)
        self._end_call(is_object_over=True)
        return True

    def _undecided(self) -> bool:
        """Handle a possible beginning of a call: wait; at the end, it is content, or dropped if truncated."""
        if not self._forced and not self._may_be_tool():
            return self._is_content()
        return self._is_content() if self._ended and not self._cut else False

    def _held(self, marks: Sequence[str]) -> int:
        """Length of the longest suffix of the buffer that may be the start of one of these markers."""
        return 0 if self._ended and not self._cut else longest_overlap(self._buffer, marks)

    def _is_content(self) -> bool:
        """Treat an apparent call as content: its opening is emitted, and calls may follow in the rest."""
        self._state = self._text if self._opened or self._calls else self._plain
        self._say(self._consume_text(self._opened))
        self._opened = 0
        return True

    def _is_tool(self, name: str) -> bool:
        assert self._format is not None
        return bool(self._format.opening) or name in self._tools

    def _may_be_tool(self) -> bool:
        """True if the buffer may become a call; for formats without an opening, compare it with tool names."""
        known = self._format
        assert known is not None
        rest = _without_blanks(self._buffer[self._opened :])
        heads = [_without_blanks(known.before + name + known.middle) for name in self._tools]
        if known.is_object:
            heads.append(_TYPED)
        return bool(known.opening) or any(rest.startswith(head[: len(rest)]) for head in heads)

    def _begin_call(self, name: str, arguments: str = "") -> None:
        self._calls += 1
        self._leading, self._parted, self._blanks = True, True, ""
        self._parts.append(AnswerPart("call", arguments, name))

    def _arguments(self) -> bool:
        count, text, is_over = self._arguments_scan.scan_piece(self._buffer)
        self._consume_text(count)
        if text:
            self._parts.append(AnswerPart("call", text))
        if is_over:
            self._end_call(is_object_over=False)
        return is_over

    def _end_call(self, *, is_object_over: bool) -> None:
        assert self._format is not None
        self._tail = [*self._format.after.split(), *self._format.closing.split()]
        self._state = self._after
        if self._format.is_object:
            self._tail.remove("}")
            if not is_object_over:
                self._scan = JsonScan(depth=1)
                self._state = self._rest_of_object

    def _rest_of_object(self) -> bool:
        """In the rest of a call object, which is dropped."""
        end = self._scan.find_end(self._buffer)
        self._consume_text(end if end >= 0 else len(self._buffer))
        if end >= 0:
            self._state = self._after
        return end >= 0

    def _after(self) -> bool:
        """After arguments: any of `after` and `closing` in order, or the separator before a next call."""
        assert self._format is not None
        stripped = self._buffer.lstrip()
        self._consume_text(len(self._buffer) - len(stripped))
        if not stripped:
            return False
        following = ""
        if self._format.shared and (self._tail or not self._format.closing):
            comma = self._format.between.strip()
            following = comma or self._format.before.lstrip()
            if stripped.startswith(following):
                self._opened = len(comma)
                self._begin_head()
                return True
        for index, literal in enumerate(self._tail):
            if stripped.startswith(literal):
                self._consume_text(len(literal))
                del self._tail[: index + 1]
                return True
        if any(literal.startswith(stripped) for literal in (*self._tail, following)):
            if self._ended:
                self._consume_text(len(stripped))  # a truncated marker
            return False
        self._state = self._text
        return True

    def _consume_text(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _say(self, text: str) -> None:
        """Emit content; whitespace directly before or after calls is dropped."""
        if self._leading:
            text = self._blanks + text
            if not text.lstrip():
                self._blanks = text
                return
            if self._parted:
                text = text.lstrip()
            self._leading, self._blanks = False, ""
        if text:
            self._parts.append(AnswerPart("content", text))


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call in one JSON object; None if it is not a call."""
    try:
        found = msgspec.json.decode(text, type=dict[str, object])
        sent = found.get("arguments", found.get("parameters"))
        arguments = msgspec.json.decode(sent) if isinstance(sent, str) else sent
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    name = found.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    if re.fullmatch(NAME, name, re.ASCII) is None:
        return None
    return name, sent if isinstance(sent, str) else msgspec.json.encode(arguments).decode()


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _openings(known: CallFormat | None) -> tuple[str, ...]:
    """Opening markers of calls, if the format has any."""
    return (known.opening, *known.openings) if known is not None and known.opening else ()


def _scan_of(known: CallFormat, schema: Mapping[str, Any]) -> JsonScan | TaggedScan | ValueScan:
    """Create the argument parser for a call of a function with this schema."""
    match known.arguments:
        case TaggedArguments() as form:
            return TaggedScan(form, schema)
        case ValueArguments() as form:
            return ValueScan(form)
    return JsonScan()


class CallStopScope(OutputParser):
    """Splits the output into tool calls, in which stop strings do not apply, and the rest."""

    def __init__(self, calls: CallFormat | None, **options: Any) -> None:
        """Take the arguments of `OutputParser`."""
        super().__init__(calls, **options)
        self._in_call = (self._head, self._arguments, self._rest_of_object, self._after)
        self._texts: list[tuple[str, bool]] = []

    def split(self, text: str) -> list[tuple[str, bool]]:
        """See `StopScope.split`."""
        self.push(text)
        return self._taken()

    def split_rest(self, *, cut: bool) -> list[tuple[str, bool]]:
        """See `StopScope.split_rest`."""
        self.finish(cut=cut)
        return [*self._taken(), (self._buffer + self._half, False)]

    def _taken(self) -> list[tuple[str, bool]]:
        texts, self._texts = self._texts, []
        return texts

    def _consume_text(self, count: int) -> str:
        counts = self._state not in self._in_call
        taken = super()._consume_text(count)
        self._texts.append((taken, counts))
        return taken


ID_CHARACTERS = 9
"""Length of a call id: Mistral's templates require this one; others accept any."""


class MessageBuilder:
    """Formats one choice; every call gets an id.

    With `hides_reasoning`, reasoning is dropped; with `single`, calls after the first are. The ids are derived from the
    choice's id, so that they are the same if it is formatted again.

    Attributes:
        is_silent: True if the last piece was only markup, for which no event is sent.
    """

    is_silent = False

    def __init__(
        self,
        parser: OutputParser | AnswerParser,
        *,
        choice_id: str,
        hides_reasoning: bool = False,
        single: bool = False,
        has_tools: bool = False,
        forced: bool = False,
    ) -> None:
        """Use a parser; `has_tools` means that the output may contain calls, `forced` that it must."""
        self._parser = parser
        self._choice_id = choice_id
        self._hides_reasoning = hides_reasoning
        self._single = single
        self._has_tools = has_tools
        self._forced = forced
        self._calls = 0
        self._seen_calls = 0

    def added(self, text: str, reason: str | None) -> ChatDelta:
        """Format the next piece of text; `reason` is the finish reason of the last piece."""
        return self._delta(self._next_parts(text, reason))

    def added_in_order(self, text: str, reason: str | None) -> list[ChatDelta]:
        """Like `added`, with a delta for each part, whose order a single one loses."""
        return [self._delta([part]) for part in self._next_parts(text, reason)]

    def _next_parts(self, text: str, reason: str | None) -> list[AnswerPart]:
        parser = self._parser
        parts = [*parser.push(text)]
        if reason is not None and isinstance(parser, OutputParser):
            parts += parser.finish(cut=reason == "length")
        elif reason is not None:
            parts += parser.finish()
        parts = list(filter(self._is_wanted, parts))
        self.is_silent = self._has_tools and not parts
        return parts

    def _is_wanted(self, part: AnswerPart) -> bool:
        if part.kind != "call":
            return True
        self._seen_calls += bool(part.name)
        return self._seen_calls == 1 or not self._single

    def message(self, text: str, reason: str) -> ChatMessage:
        """Format a complete output with this finish reason."""
        added = self.added(text, reason)
        calls = added.tool_calls or []
        return ChatMessage(
            added.content or (None if calls else ""),
            tool_calls=[ToolCallOutput(str(each.id), each.function) for each in calls] or UNSET,
            reasoning_content=added.reasoning_content,
            reasoning=added.reasoning,
        )

    def finish_reason(self, reason: str) -> str:
        """OpenAI's finish reason: `tool_calls` only if all calls are complete."""
        parser = self._parser
        # A checkpoint's own parser reports complete calls only.
        is_open = isinstance(parser, OutputParser) and parser.has_open_call
        has_called = self._calls > 0 and not (is_open and self._calls == self._seen_calls)
        return "tool_calls" if reason == "stop" and has_called else reason

    def _delta(self, parts: Sequence[AnswerPart]) -> ChatDelta:
        content = reasoning = ""
        calls: list[ToolCallDelta] = []
        for part in parts:
            if part.kind == "content":
                content += part.text
            elif part.kind == "reasoning":
                reasoning += "" if self._hides_reasoning else part.text
            elif part.name:
                function = FunctionOutput(part.name, part.text)
                made = self._call_id()
                calls.append(ToolCallDelta(self._calls, function, id=made, type="function"))
                self._calls += 1
            else:
                if not calls:  # continues from an earlier piece
                    calls.append(ToolCallDelta(self._calls - 1, FunctionOutput()))
                calls[-1].function.arguments += part.text
        return ChatDelta(
            content=content if content or not (calls or reasoning or self._forced) else UNSET,
            tool_calls=calls or UNSET,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or UNSET,
        )

    def _call_id(self) -> str:
        name = f"{self._choice_id}/{self._calls}".encode()
        return blake2b(name, person=b"vsched.call").hexdigest()[:ID_CHARACTERS]
