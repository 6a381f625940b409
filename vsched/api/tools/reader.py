"""Reads an answer as it comes: text in, content and calls out.

The reader is a state machine over the text alone. A piece of text is let out once no continuation could change what
it is, so that however an answer is cut into pieces, the same message comes of it, streamed or whole. No letter is
lost: what begins like a call and is none is content, and so is what follows arguments without belonging to the call.
If an answer was truncated, or must be a call, an end that may be the beginning of a call is dropped, so that clients
see no markup.

The name of a call is known before its arguments are, so these are let out as they come. They end where the brackets
of their object do; whether what is within them is JSON is for the client to see, as with OpenAI.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from vsched.api.tools.arguments.json_scan import JsonScan
from vsched.api.tools.arguments.marks import first_mark, longest_overlap
from vsched.api.tools.arguments.tagged_scan import TaggedScan
from vsched.api.tools.arguments.value_scan import ValueScan
from vsched.api.tools.formats import (
    NAME,
    CallFormat,
    ReasoningFormat,
    TaggedArguments,
    ValueArguments,
)

HEAD_CHARACTERS_MAX = 512
"""No head of a call is as long, blanks included: where none was found within, there is none."""
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id", "function"})
"""An object that begins with another is no call: an answer in JSON need not be held back to its end."""

_HALF = "\N{REPLACEMENT CHARACTER}"
"""The text of half a character, with which an answer can be cut within the marks of DeepSeek's calls."""

_TYPED = '{"type":"function"'
"""The beginning of a call object with a type."""


class ContentText(NamedTuple):
    """A piece of the answer's text."""

    text: str


class CallBegins(NamedTuple):
    """A call of a function; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """A piece of the JSON of the last call's arguments."""

    text: str


class Reasoning(NamedTuple):
    """A piece of what the model thinks before it answers."""

    text: str


Event = Reasoning | ContentText | CallBegins | CallArguments


class ArgumentScan(Protocol):
    """Turns the arguments of one call into JSON."""

    def take(self, text: str, *, ended: bool) -> tuple[int, str, bool]:
        """Take from `text`, which begins with what was not taken before; with `ended`, nothing follows it.

        Returns:
            How much of it was taken, the JSON that is certain, and whether the arguments are over.
        """
        ...


class AnswerReader:
    """Reads one answer.

    `tools` has the schemas of their arguments by name: where calls have no opening, an answer is one only with such a
    name. With `single`, calls after the first are dropped. With `forced`, the answer must consist of calls; with
    `thinking`, the prompt has begun the reasoning.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        *,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        single: bool = False,
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
        self._single = single
        self._forced = forced
        self._calls = 0
        self._buffer = ""
        self._half = ""
        self._scan = JsonScan()
        self._arguments_scan: ArgumentScan = self._scan
        self._scanned = 0
        self._opened = 0
        self._tail: list[str] = []
        self._leading = True
        self._blanks = ""
        self._ended = False
        self._cut = False
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._begin if reasoning is not None else self._answer

    def push(self, text: str) -> list[Event]:
        """Take the next piece of the answer; return what is certain."""
        text = self._half + text
        whole = text.rstrip(_HALF)
        self._half = text[len(whole) :]
        self._buffer += whole
        events = self._advance()
        # With text in the buffer, the incomplete character may belong to a mark: wait for the next piece.
        if self._half and not self._buffer:
            self._buffer, self._half = self._half, ""
            events += self._advance()
        return events

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the events held back; if the answer was truncated, drop a possible beginning of a call or mark."""
        self._ended = True
        self._cut = cut or self._forced
        if not self._cut:
            self._buffer, self._half = self._buffer + self._half, ""
        events = self._advance()
        if self._leading and self._blanks and not (self._parted or self._buffer or self._forced):
            events.append(ContentText(self._blanks))
        return events

    @property
    def has_open_call(self) -> bool:
        """True if the arguments of the last call in the output are incomplete."""
        return self._state == self._arguments and not (self._single and self._calls > 1)

    def _advance(self) -> list[Event]:
        while self._buffer and self._state():
            pass
        events, self._events = self._events, []
        return events

    # Each state takes what is certain from the buffer, and returns whether there may be more to take.

    def _begin(self) -> bool:
        """What the model thinks, or where the prompt did not begin it, perhaps the answer."""
        assert self._reasoning is not None
        stripped = self._buffer.lstrip()
        begin = self._reasoning.begin
        may_begin = len(stripped) < len(begin) and begin.startswith(stripped)
        if may_begin and (not self._ended or (self._cut and stripped)):
            return False
        self._state = self._answer
        if stripped.startswith(begin):
            self._take(len(self._buffer) - len(stripped) + len(begin))
            self._thinking = True
        if self._thinking:
            self._state = self._thought
        return True

    def _thought(self) -> bool:
        """Reasoning, up to its end; blanks around it are none."""
        assert self._reasoning is not None
        end = self._reasoning.end
        at = self._buffer.find(end)
        held = 0 if at >= 0 else self._held((end,))
        text = self._buffer[: at if at >= 0 else len(self._buffer) - held]
        if not self._parted:
            self._take(len(text) - len(text.lstrip()))
            text = text.lstrip()
        if said := text.rstrip():
            self._parted = True
            self._events.append(Reasoning(self._take(len(said))))
        if at < 0:
            return False
        self._take(len(text) - len(said) + len(end))
        self._parted = True
        self._state = self._answer
        return True

    def _answer(self) -> bool:
        """What comes behind reasoning."""
        bare = self._format is not None and not self._format.opening
        self._state = self._bare if bare else self._text
        return True

    def _plain(self) -> bool:
        """Nothing but content follows."""
        self._say(self._take(len(self._buffer)))
        return False

    def _text(self) -> bool:
        """Content, up to where calls begin, or what frames it."""
        if not self._marks:
            return self._plain()
        at, mark = first_mark(self._buffer, self._marks)
        if at < 0:
            held = self._held(self._marks)
            self._say(self._take(len(self._buffer) - held))
            return False
        self._say(self._take(at))
        if mark in self._openings:
            self._opened = len(mark)
            self._state = self._first
        else:
            self._take(len(mark))
            if mark not in self._frames:
                self._state = self._thought
        return True

    def _bare(self) -> bool:
        """The first letter tells whether an answer may be a call."""
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
        """What stands between the opening and its first call."""
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
        """An opening, if it was not taken before, and what stands before arguments."""
        assert self._format is not None
        assert self._head_pattern is not None
        head = self._head_pattern.match(self._buffer, self._opened)
        if head is not None and self._is_tool(head["name"]):
            self._begin_call(head["name"])
            self._take(head.end())
            self._arguments_scan = _scan_of(self._format, self._tools.get(head["name"], {}))
            self._state = self._arguments
            return True
        if not self._format.is_object:
            is_long = len(self._buffer) > self._opened + HEAD_CHARACTERS_MAX
            return self._is_content() if is_long else self._undecided()
        return self._object()

    def _object(self) -> bool:
        """A call whose keys come otherwise is read once it is whole."""
        start = len(self._buffer) - len(self._buffer[self._opened :].lstrip())
        if start == len(self._buffer):
            return self._undecided()
        if self._buffer[start : start + 1] != "{":
            return self._is_content()
        key = _FIRST_KEY.match(self._buffer, start)
        if key is not None and key[1] not in _CALL_KEYS:
            return self._is_content()
        end = self._scan.end(self._buffer, self._scanned)
        self._scanned = len(self._buffer)
        call = _call_of(self._buffer[start:end]) if end >= 0 else None
        if end < 0:
            return self._undecided() if self._ended else False
        if call is None or not self._is_tool(call[0]):
            return self._is_content()
        name, arguments = call
        self._begin_call(name)
        self._tell(CallArguments(arguments))
        self._take(end)
        self._end_call(is_object_over=True)
        return True

    def _undecided(self) -> bool:
        """Handle a possible beginning of a call: wait; at the end, it is content, or dropped if truncated."""
        if not self._forced and not self._may_be_tool():
            return self._is_content()
        return self._is_content() if self._ended and not self._cut else False

    def _held(self, marks: Sequence[str]) -> int:
        """Return the length of the longest suffix of the buffer that may be the beginning of one of these marks."""
        return 0 if self._ended and not self._cut else longest_overlap(self._buffer, marks)

    def _is_content(self) -> bool:
        """What began like a call is none: its opening is content, and calls may follow in the rest."""
        self._state = self._text if self._opened or self._calls else self._plain
        self._say(self._take(self._opened))
        self._opened = 0
        return True

    def _is_tool(self, name: str) -> bool:
        assert self._format is not None
        return bool(self._format.opening) or name in self._tools

    def _may_be_tool(self) -> bool:
        """Return True if the buffer may become a call; for formats without an opening, compare it with tool names."""
        known = self._format
        assert known is not None
        rest = _without_blanks(self._buffer[self._opened :])
        heads = [_without_blanks(known.before + name + known.middle) for name in self._tools]
        if known.is_object:
            heads.append(_TYPED)
        return bool(known.opening) or any(rest.startswith(head[: len(rest)]) for head in heads)

    def _begin_call(self, name: str) -> None:
        self._calls += 1
        self._leading, self._parted, self._blanks = True, True, ""
        self._tell(CallBegins(name))

    def _tell(self, event: Event) -> None:
        if not self._single or self._calls == 1:
            self._events.append(event)

    def _arguments(self) -> bool:
        count, text, is_over = self._arguments_scan.take(self._buffer, ended=self._ended)
        self._take(count)
        if text:
            self._tell(CallArguments(text))
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
        """What else the object of a call holds, which clients are not told."""
        end = self._scan.end(self._buffer)
        self._take(end if end >= 0 else len(self._buffer))
        if end >= 0:
            self._state = self._after
        return end >= 0

    def _after(self) -> bool:
        """What may stand behind arguments: any of `after` and `closing` in order, or what comes before a next call."""
        assert self._format is not None
        stripped = self._buffer.lstrip()
        self._take(len(self._buffer) - len(stripped))
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
                self._take(len(literal))
                del self._tail[: index + 1]
                return True
        if any(literal.startswith(stripped) for literal in (*self._tail, following)):
            if self._ended:
                self._take(len(stripped))  # a mark that was cut
            return False
        self._state = self._text
        return True

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _say(self, text: str) -> None:
        """Let content out; blanks that lead to a call, or follow one, are none."""
        if self._leading:
            text = self._blanks + text
            if not text.lstrip():
                self._blanks = text
                return
            if self._parted:
                text = text.lstrip()
            self._leading, self._blanks = False, ""
        if text:
            self._events.append(ContentText(text))


def _call_of(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call that is one JSON object; None where it is no call."""
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
    """Return what calls begin with, if that is a mark."""
    return (known.opening, *known.openings) if known is not None and known.opening else ()


def _scan_of(known: CallFormat, schema: Mapping[str, Any]) -> ArgumentScan:
    """Return what reads the arguments of a call of a function with this schema."""
    match known.arguments:
        case TaggedArguments() as form:
            return TaggedScan(form, schema)
        case ValueArguments() as form:
            return ValueScan(form)
    return JsonScan()
