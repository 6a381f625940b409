"""Arguments between tags, as Qwen3-Coder and GLM write them.

Strings stand between their tags without quotes. So the schema of the function distinguishes strings, which are
streamed, from other values, which are JSON and converted when they are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vsched.api.tools.arguments.kinds import WORDS, json_of, quoted, resolved, types_of
from vsched.api.tools.arguments.marks import longest_overlap
from vsched.api.tools.formats import TaggedArguments

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
