"""Arguments in notations other than JSON: keys and values in brackets, as Python and Gemma write them.

The notation is data (`ValueArguments`): its quotes and constants. JSON is accepted as well. Text that is neither a
value nor a separator is passed on unchanged, so that clients can see the model's mistake.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import msgspec

from vsched.api.tools.arguments.kinds import WORDS, quoted
from vsched.api.tools.arguments.marks import longest_overlap
from vsched.api.tools.formats import ValueArguments

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
