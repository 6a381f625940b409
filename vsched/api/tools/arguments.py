"""Arguments in JSON: passed on unchanged, up to the closing bracket."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from vsched.api.tools.formats import TaggedArguments, ValueArguments

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class JsonScan:
    """Finds the end of a bracketed JSON value in streamed text."""

    __slots__ = ("_depth", "_escaped", "_in_text")

    def __init__(self, depth: int = 0) -> None:
        """Start before a bracket, or within `depth` brackets."""
        self._depth = depth
        self._in_text = False
        self._escaped = False

    def end(self, text: str, start: int = 0) -> int:
        """Process the next piece, from `start` on; return the index after the last bracket, or -1."""
        at = start
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while found := (_INSIDE if self._in_text else _OUTSIDE).search(text, at):
            at = found.end()
            match found[0]:
                case '"':
                    self._in_text = not self._in_text
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return -1

    def take(self, text: str, *, ended: bool) -> tuple[int, str, bool]:
        """Process the next piece of the arguments; see `ArgumentScan`."""
        del ended  # nothing is held back
        end = self.end(text)
        count = end if end >= 0 else len(text)
        return count, text[:count], end >= 0


_REFERENCES_MAX = 8
WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
"""Python's constants: templates that use them teach models to write them."""
_NAMES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve a schema's reference within `root`; empty if the target is not found."""
    for _ in range(_REFERENCES_MAX):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root if reference.startswith("#") else None
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return {}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Types that a schema allows; empty if it does not specify them."""
    known = resolved(schema, root)
    said = known.get("type")
    if isinstance(said, str):
        return frozenset([said])
    if isinstance(said, list):
        return frozenset(each for each in said if isinstance(each, str))
    for key in ("enum", "const"):
        if key in known:
            values = known[key] if key == "enum" else [known[key]]
            return frozenset(map(type_name, values if isinstance(values, list) else []))
    for key in ("anyOf", "oneOf"):
        options = known.get(key)
        if isinstance(options, list) and options:
            found = [types_of(each, root) for each in options]
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def type_name(value: object) -> str:
    """JSON schema type of a value."""
    if value is None:
        return "null"
    return _NAMES.get(type(value), "string")


def quoted(text: str) -> str:
    """Escape a text, or a piece of one, for a JSON string."""
    return msgspec.json.encode(text.encode("utf-8", "replace").decode()).decode()[1:-1]


def json_of(text: str, types: frozenset[str]) -> str:
    """Convert a value without quotes to JSON.

    A value whose type the schema does not allow becomes a string.
    """
    stripped = text.strip()
    stripped = WORDS.get(stripped, stripped)
    try:
        name = type_name(msgspec.json.decode(stripped))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        name = "string"
    fits = name in types or (name == "integer" and "number" in types)
    if name != "string" and (fits or "string" not in types):
        return stripped
    return f'"{quoted(text)}"'


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def longest_overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that may be the start of one of these markers."""
    return max((overlap(text, mark) for mark in marks), default=0)


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Position of the first of these markers, and the marker; -1 if there is none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))


KEY_CHARACTERS_MAX = 256
"""Maximum length of an argument's name: a longer one is not an argument."""
_TEXT = frozenset(["string"])
_CAPITALS = tuple(word[0] for word in WORDS)
"""First letters of Python's constants (`True`, `None`), with which no JSON value begins."""


class TaggedScan:
    """Converts arguments between tags to JSON, incrementally."""

    def __init__(self, form: TaggedArguments, schema: Mapping[str, Any]) -> None:
        """Start after the head of a call; `schema` is that function's schema."""
        self._form = form
        self._schema = schema
        self._end = form.after.strip()
        self._break = form.after[: len(form.after) - len(form.after.lstrip())]
        self._types: frozenset[str] = frozenset()
        self._count = 0
        self._out = ""
        self._text = ""
        self._ended = False
        self._done = False
        self._state: Callable[[], bool] = self._begin

    def take(self, text: str, *, ended: bool) -> tuple[int, str, bool]:
        """Process the next piece; see `ArgumentScan`."""
        self._text, self._ended = text, ended
        while self._state():
            pass
        out, self._out = self._out, ""
        return len(text) - len(self._text), out, self._done

    def _begin(self) -> bool:
        self._out += "{"
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Before a tag of an argument, or the end of the call."""
        self._text = self._text.lstrip()
        before = self._form.before
        if not self._text or (before.startswith(self._text) and self._text != before):
            return False
        if self._text.startswith(before):
            self._state = self._key
            return True
        return self._finish()

    def _finish(self) -> bool:
        self._out += "}"
        self._done = True
        self._state = lambda: False
        return False

    def _key(self) -> bool:
        found = self._form.key.match(self._text)
        if found is None:
            longer = len(self._form.before) + KEY_CHARACTERS_MAX
            return self._finish() if len(self._text) > longer else False
        rest = self._text[found.end() :]
        lead = self._form.lead
        if lead and not rest and not self._ended:
            return False
        name = found["name"]
        properties = resolved(self._schema, self._schema).get("properties")
        known = properties.get(name) if isinstance(properties, Mapping) else None
        self._types = types_of(known, self._schema) if known is not None else frozenset()
        self._out += f'{"," if self._count else ""}"{quoted(name)}":'
        self._count += 1
        self._text = rest.removeprefix(lead) if lead else rest
        self._state = self._value
        if self._types == _TEXT:
            self._out += '"'
            self._state = self._piece
        return True

    def _piece(self) -> bool:
        """In a string, which is streamed."""
        at = self._text.find(self._end)
        if at < 0:
            marks = (self._end, self._break + self._end)
            cut = len(self._text) - longest_overlap(self._text, marks)
            self._out += quoted(self._text[:cut])
            self._text = self._text[cut:]
            return False
        self._out += quoted(self._text[:at].removesuffix(self._break)) + '"'
        return self._next(at)

    def _value(self) -> bool:
        """In a value, which is converted when complete."""
        at = self._text.find(self._end)
        if at < 0:
            if self._ended:
                self._cut()
            return False
        self._out += json_of(self._text[:at].removesuffix(self._break), self._types)
        return self._next(at)

    def _cut(self) -> None:
        """Emit a truncated value, unless its JSON would begin differently, like a string, which needs a quote."""
        cut = len(self._text) - longest_overlap(self._text, (self._end,))
        text, self._text = self._text[:cut].strip(), ""
        if self._types and "string" not in self._types and not text.startswith(_CAPITALS):
            self._out += text

    def _next(self, at: int) -> bool:
        self._text = self._text[at + len(self._end) :]
        self._state = self._between
        return True


_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NAMED = frozenset(["true", "false", "null"])
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL)
_HEX_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{0,1}|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_SAME = frozenset('nrtbf"\\/')
_OTHERS = {"'": "'", "\n": "", "a": "\\u0007", "v": "\\u000b", "0": "\\u0000"}


class _Frame:
    """An open object or list.

    Attributes:
        is_object: True for an object, with keys and values.
        count: Items so far.
    """

    __slots__ = ("count", "is_object")

    def __init__(self, *, is_object: bool) -> None:
        self.is_object = is_object
        self.count = 0


class ValueScan:
    """Converts arguments in a notation to JSON, incrementally."""

    def __init__(self, form: ValueArguments) -> None:
        """Start after the opening bracket of the arguments."""
        self._quotes = (*form.raw_quotes, *form.quotes)
        self._form = form
        self._frames = [_Frame(is_object=True)]
        self._quote = ""
        self._text = ""
        self._out = "{"
        self._ended = False
        self._state: Callable[[], bool] = self._item

    def take(self, text: str, *, ended: bool) -> tuple[int, str, bool]:
        """Process the next piece; see `ArgumentScan`."""
        self._text, self._ended = text, ended
        while self._frames and self._state():
            pass
        out, self._out = self._out, ""
        return len(text) - len(self._text), out, not self._frames

    def _item(self) -> bool:
        """Before a key or a list item, or the closing bracket."""
        self._text = self._text.lstrip()
        if not self._text:
            return False
        if self._text[0] == ",":
            return self._skip()
        if self._text[0] in ")]}":
            return self._close()
        if not self._knows_quote():
            return False
        frame = self._frames[-1]
        if frame.is_object:
            return self._key(frame)
        self._comma(frame)
        return self._value()

    def _knows_quote(self) -> bool:
        """True if it is certain whether, and which, quote comes next; a partial quote at the end is not."""
        if self._ended:
            return True
        longer = [mark for mark in self._quotes if len(mark) > len(self._text)]
        return not any(mark.startswith(self._text) for mark in longer)

    def _comma(self, frame: _Frame) -> None:
        """Write the comma before an item, so that a trailing comma is dropped."""
        self._out += "," if frame.count else ""
        frame.count += 1

    def _skip(self) -> bool:
        self._text = self._text[1:]
        return True

    def _close(self) -> bool:
        self._out += "}" if self._frames.pop().is_object else "]"
        self._state = self._behind
        return self._skip()

    def _opening_quote(self) -> str:
        return next((mark for mark in self._quotes if self._text.startswith(mark)), "")

    def _key(self, frame: _Frame) -> bool:
        if quote := self._opening_quote():
            self._comma(frame)
            self._begin_text(quote)
            return True
        found = re.search(r"[=:,)\]}]", self._text)
        if found is None:
            return False
        end = found.start()
        self._comma(frame)
        self._out += f'"{quoted(self._text[:end].strip())}"'
        self._text = self._text[end:]
        self._state = self._behind
        return True

    def _value(self) -> bool:
        """Before a value; its first character determines its type."""
        self._state = self._value
        self._text = self._text.lstrip()
        if not self._text or not self._knows_quote():
            return False
        if quote := self._opening_quote():
            self._begin_text(quote)
            return True
        if self._text[0] in "{[(":
            is_object = self._text[0] == "{"
            self._frames.append(_Frame(is_object=is_object))
            self._out += "{" if is_object else "["
            self._state = self._item
            return self._skip()
        return self._word()

    def _word(self) -> bool:
        """In a value without quotes, up to the next separator."""
        found = re.search(r"[,)\]}]", self._text)
        if found is None and not (self._ended and _NUMBER.fullmatch(self._text)):
            return False  # a truncated word could become anything
        end = found.start() if found else len(self._text)
        self._out += _json_of_word(self._text[:end].strip())
        self._text = self._text[end:]
        self._state = self._behind
        return True

    def _behind(self) -> bool:
        """After a key or a value."""
        self._text = self._text.lstrip()
        if not self._text:
            return False
        if self._text[0] in ",)]}":
            self._state = self._item
        elif self._text[0] in ":=" and self._frames[-1].is_object:
            self._out += ":"
            self._text = self._text[1:]
            self._state = self._value
        else:
            self._out += quoted(self._text[0])
            self._text = self._text[1:]
        return True

    def _begin_text(self, quote: str) -> None:
        self._quote = quote
        self._text = self._text[len(quote) :]
        self._out += '"'
        self._state = self._piece

    def _piece(self) -> bool:
        """In a string, which is streamed."""
        quote, text = self._quote, self._text
        escapes = quote not in self._form.raw_quotes
        end = text.find(quote)
        slash = text.find("\\") if escapes else -1
        if slash >= 0 and (end < 0 or slash < end):
            self._out += quoted(text[:slash])
            self._text = text[slash:]
            return self._escape()
        if end < 0:
            cut = len(text) - longest_overlap(text, (quote,))
            self._out += quoted(text[:cut])
            self._text = text[cut:]
            return False
        self._out += quoted(text[:end]) + '"'
        self._text = text[end + len(quote) :]
        self._state = self._behind
        return True

    def _escape(self) -> bool:
        """At a backslash escape."""
        found = _ESCAPE.match(self._text)
        if found is None:
            if not self._ended and _HEX_ESCAPE.fullmatch(self._text):
                return False
            self._out += "\\\\"  # an unknown escape, or a truncated one
            return self._skip()
        self._out += _json_of_escape(found[0][1:])
        self._text = self._text[found.end() :]
        return True


def _json_of_escape(escape: str) -> str:
    """Convert a Python escape, without its backslash, to JSON."""
    if escape[0] == "u" and len(escape) > 1:
        return "\\" + escape
    if escape[0] == "x" and len(escape) > 1:
        return "\\u00" + escape[1:]
    if escape[0] == "U" and len(escape) > 1:
        point = int(escape[1:], 16)
        return quoted(chr(point)) if point <= 0x10FFFF else "\\ufffd"
    if escape in _SAME:
        return "\\" + escape
    return _OTHERS.get(escape, "\\\\" + quoted(escape))


def _json_of_word(word: str) -> str:
    """Convert a value without quotes to JSON: a number, a constant of Python or JSON, otherwise a string."""
    if word in _NAMED or _NUMBER.fullmatch(word):
        return word
    if word in WORDS:
        return WORDS[word]
    for number in (lambda: int(word, 0), lambda: float(word)):
        try:
            value = number()
        except ValueError:
            continue
        if math.isfinite(value):
            return msgspec.json.encode(value).decode() if abs(value) < 2**63 else str(value)
    return f'"{quoted(word)}"'
