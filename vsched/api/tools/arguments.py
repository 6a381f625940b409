"""Arguments of calls as JSON: JSON is passed on as it comes, other notations are converted when complete."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    def find_end(self, text: str, start: int = 0) -> int:
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

    def scan_piece(self, text: str) -> tuple[int, str, bool]:
        """Process the next piece of the arguments, of which nothing is held back; see `ValueScan.scan_piece`."""
        end = self.find_end(text)
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
    types: set[str] = set()
    for known in alternatives(schema, root, _options):
        said = known.get("type") if isinstance(known, dict) else None
        found: list[Any] = said if isinstance(said, list) else [said]
        if said is None and isinstance(known, dict) and {"enum", "const"} & known.keys():
            values = known["enum"] if "enum" in known else [known["const"]]
            found = [*map(type_name, values)] if isinstance(values, list) else []
        own = {each for each in found if isinstance(each, str)}
        if not own:
            return frozenset()
        types |= own
    return frozenset(types)


def _options(schema: Mapping[str, Any]) -> list[Any] | None:
    if {"type", "enum", "const"} & schema.keys():
        return None
    options = [schema[key] for key in ("anyOf", "oneOf") if schema.get(key)]
    return options[0] if options and isinstance(options[0], list) else None


def alternatives(
    schema: Any, root: Mapping[str, Any], options: Callable[[Mapping[str, Any]], list[Any] | None]
) -> Iterator[Any]:
    """Yield the alternatives of a schema, with references resolved; `options` returns those of a union.

    Each union is expanded once: unions that refer to unions may have exponentially many paths, or endless ones.
    """
    waiting: list[Any] = [schema]
    expanded: dict[int, Any] = {}
    while waiting:
        known = waiting.pop()
        if isinstance(known, dict):
            known = resolved(known, root)
            if id(known) in expanded:
                continue
            if found := options(known):
                expanded[id(known)] = known
                waiting += reversed(found)
                continue
        yield known


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


class TaggedScan:
    """Converts arguments between tags to JSON, each when it is complete."""

    def __init__(self, form: TaggedArguments, schema: Mapping[str, Any]) -> None:
        """Start after the head of a call; `schema` is that function's schema."""
        self._form = form
        self._schema = schema
        self._key = form.key
        self._end = form.after.strip()
        self._break = form.after[: len(form.after) - len(form.after.lstrip())]
        self._before = "{"

    def scan_piece(self, text: str) -> tuple[int, str, bool]:
        """Process the next piece; see `ValueScan.scan_piece`."""
        out, at, before = "", 0, self._form.before
        while True:
            rest = text[at:].lstrip()
            at = len(text) - len(rest)
            if not rest or (before.startswith(rest) and rest != before):
                return at, out, False
            key = self._key.match(rest)
            if not rest.startswith(before) or (
                key is None and len(rest) > len(before) + KEY_CHARACTERS_MAX
            ):
                return at, out + ("{}" if self._before == "{" else "}"), True
            end = rest.find(self._end, key.end()) if key is not None else -1
            if key is None or end < 0:
                return at, out, False
            value = rest[key.end() : end].removeprefix(self._form.lead).removesuffix(self._break)
            out += (
                f'{self._before}"{quoted(key["name"])}":{json_of(value, self._types(key["name"]))}'
            )
            self._before = ","
            at += end + len(self._end)

    def _types(self, name: str) -> frozenset[str]:
        properties = resolved(self._schema, self._schema).get("properties")
        known = properties.get(name) if isinstance(properties, Mapping) else None
        return types_of(known, self._schema) if known is not None else frozenset()


_WORD_CHARACTERS_MAX = 64
"""Maximum length of a number or constant."""
_JSON_WORDS = frozenset(["true", "false", "null"])
_KEY = re.compile(r"[^=:,)\]}]+")
_VALUE = re.compile(r"[^,)\]}]+")
_SPACE = re.compile(r"\s*")


class ValueScan:
    """Converts arguments in a notation to JSON, when all are complete; each piece is read once.

    Attributes:
        sought: Index before which an incomplete text has no closing quote.
    """

    def __init__(self, form: ValueArguments) -> None:
        """Start after the opening bracket of the arguments."""
        self._form = form
        self._quotes = [
            *((quote, re.compile(re.escape(quote))) for quote in form.raw_quotes),
            *((quote, re.compile(rf"\\.|{quote}", re.DOTALL)) for quote in form.quotes),
        ]
        self._tried = -1
        self._out, self._closing = ["{"], ["}"]
        self._has_key = False
        self._at = 0
        """Everything before is in `_out`."""
        self.sought = 0

    def scan_piece(self, text: str) -> tuple[int, str, bool]:
        """Process `text`, which starts with the unprocessed rest of the last one.

        Returns:
            Number of characters processed, the JSON that is certain, and whether the arguments are complete.
        """
        last = text.rfind(self._form.closing)
        found = self._converted(text) if last > self._tried else None
        self._tried = last
        return (0, "", False) if found is None else (*found, True)

    def _converted(self, text: str) -> tuple[int, str] | None:
        """Length of the arguments up to the closing bracket, and their JSON; None if they are incomplete."""
        out, closing = self._out, self._closing
        while (at := _SPACE.match(text, self._at).end()) < len(text):  # type: ignore[union-attr]
            first, is_key = text[at], closing[-1] == "}" and not self._has_key
            if first in ")]}":
                out.append(closing.pop())
                self._at, self._has_key = at + 1, False
                if not closing:
                    return self._at, "".join(out)
                continue
            if first in ",:=":
                self._has_key = first != "," and closing[-1] == "}"
                self._at = at + 1
                continue
            between = "" if out[-1] in {"{", "["} else ":" if self._has_key else ","
            if first in "{[(" and not is_key:
                out += [between, "{" if first == "{" else "["]
                closing.append("}" if first == "{" else "]")
                self._at, self._has_key = at + 1, False
                continue
            item = self._item(text, at, is_key=is_key)
            # A word at the end may go on, and "" may begin a long text.
            if item is None or item[0] == len(text):
                return None
            self._at, self._has_key = item[0], False
            out += [between, item[1]]
        return None

    def _item(self, text: str, at: int, *, is_key: bool) -> tuple[int, str] | None:
        """End and JSON of a key or a simple value; None if it is incomplete."""
        for quote, pattern in self._quotes:
            if text.startswith(quote, at):
                begin = at + len(quote)
                end = self._end_of_text(text, begin, quote, pattern)
                if end < 0:
                    return None
                held = text[begin : end - len(quote)]
                return (
                    end,
                    f'"{quoted(held if quote in self._form.raw_quotes else _unescaped(held))}"',
                )
        word = (_KEY if is_key else _VALUE).match(text, at)
        if word is None:
            return None
        stripped = word[0].strip()
        return word.end(), f'"{quoted(stripped)}"' if is_key else _json_of_word(stripped)

    def _end_of_text(self, text: str, begin: int, quote: str, pattern: re.Pattern[str]) -> int:
        """Return the index after the closing quote; -1 if there is none yet."""
        at = max(begin, self.sought)
        while found := pattern.search(text, at):
            at = found.end()
            if found[0] == quote:
                return at
        # An escape or the quote may begin at the end.
        self.sought = max(at, len(text) - len(quote) + 1 - text.endswith("\\"))
        return -1


_SPECIAL = re.compile(r'\\.|["\n\r\0]', re.DOTALL)
_WRITTEN = {"\\/": "/", '"': '\\"', "\n": "\\n", "\r": "\\r", "\0": "\\x00"}
"""Spelling in a Python literal of JSON's `\\/`, and of characters that models do not escape."""


def _unescaped(text: str) -> str:
    """Resolve the escapes of Python and JSON in a text."""
    if "\\" not in text:
        return text
    source = _SPECIAL.sub(lambda found: _WRITTEN.get(found[0], found[0]), text)
    try:
        with warnings.catch_warnings(action="ignore"):
            value: str = ast.literal_eval(f'"{source}"')
    except (SyntaxError, ValueError):
        return text  # a truncated escape
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json_of_word(word: str) -> str:
    """Convert a value without quotes to JSON: a number, a constant of Python or JSON, otherwise a string."""
    if word in _JSON_WORDS:
        return word
    value: object = word
    if len(word) <= _WORD_CHARACTERS_MAX:
        with contextlib.suppress(SyntaxError, ValueError):
            value = ast.literal_eval(word)
    if isinstance(value, float) and math.isinf(value):
        value = word
    return json.dumps(value if value is None or isinstance(value, bool | int | float) else word)
