r"""Translation of regular expressions in JSON schemas to the syntax of the grammar library.

JSON Schema uses ECMA-262, whose syntax and character classes differ slightly from Rust's `regex`: `.` matches fewer
characters, `[` is literal inside a class, `\cA` is a control character; `\d` and `\w` are ASCII. If JavaScript, Python
and Rust disagree about `.` or whitespace, only the characters that all of them accept match.
"""

from __future__ import annotations

import re

from vsched.errors import limit_message

GROUPS_MAX = 64
"""Maximum depth of nested groups in a pattern."""

LOOKAHEADS_MAX = 16
LOOKAHEAD_CHARACTERS_MAX = 2000
"""Longer patterns keep their lookaheads, which are refused."""
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_SPACE = r"\t\n\x0b\x0c\r "
_NO_SPACE = r"\s\x1c-\x1f\x{feff}"
"""All characters that some validator treats as whitespace."""
_LOOKAROUNDS = ("(?=", "(?!", "(?<=", "(?<!")
_DOT_IS_ANY = re.compile(r"\(\?[imux]*s")
_ONE_CHARACTER = r"(\\[^\w\s]|[^\\\[\](){}.*+?^$|]|\[[^\]\\]*\])"
_HEADS = [
    # Not only these characters.
    (re.compile(r"\(\?!\^\[([^\]\\^]+)\]\*\$\)"), r"[^\1]"),
    # Not twice the same character.
    (re.compile(rf"\(\?!\.\*{_ONE_CHARACTER}\1\)"), r"^(?:(?:\1)?(?!\1))*(?:\1)?$"),
    # Not this character first.
    (re.compile(rf"\(\?!{_ONE_CHARACTER}\)"), r"^(?:$|(?!\1))"),
]
"""Negative lookaheads at the start of a pattern, each with an equivalent pattern without a lookahead."""
_DECIMAL = re.compile(
    r"\[\+-\]\?0\*\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)"
    r"\\d\{0,\d+\}\\\.\\d\{0,(?P<places>\d+)\}0\*\$\)"
)
_DIGITS = re.compile(
    r"\[\+-\]\?0\*\(\?:\\d\{0,(?P<digits>\d+)\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)\\d\*\\\.\\d\*0\*\$\)"
)
"""Pydantic's patterns that limit the digits of a `Decimal`."""


class PatternError(ValueError):
    """A pattern that cannot be used; the message gives the reason and the remedy."""


def split_lookaheads(pattern: str) -> list[str]:
    """Split a pattern with lookaheads into patterns without, all of which a string must match.

    This covers lookaheads at the start of a pattern as used by pydantic (`Decimal`), zod (`email`) and password rules;
    others stay in the pattern.
    """
    if not pattern.startswith("^(?") or len(pattern) > LOOKAHEAD_CHARACTERS_MAX:
        return [pattern]
    found: list[str] = []
    rest = pattern[1:]
    for _ in range(LOOKAHEADS_MAX):
        for head, meaning in _HEADS:
            if match := head.match(rest):
                made = meaning.replace(r"(?!\1)", _other_than(match[1])).replace(r"\1", match[1])
                found.append(made)
                rest = rest[match.end() :]
                break
        else:
            end = _end_of_group(rest) if rest.startswith("(?=") else 0
            if not end or "|" in _outside_groups(rest):
                break
            found.append(f"^(?:{rest[3 : end - 1]})")
            rest = rest[end:]
    if not found or "|" in _outside_groups(rest):
        return [pattern]
    if match := _DECIMAL.fullmatch(rest):
        rest = rf"[+-]?0?\d{{0,{match['whole']}}}(\.\d{{0,{match['places']}}})?$"
    elif match := _DIGITS.fullmatch(rest):
        digits = int(match["digits"])
        found.append(rf"^[+-]?[\d.]{{0,{digits + 1}}}$")
        rest = rf"[+-]?\d{{0,{digits}}}(\.\d*)?$"
    return [*found, "^" + rest]


def _other_than(character: str) -> str:
    """Return the complement of a character or a character class."""
    if not character.startswith("["):
        return f"[^{character}]"
    inner = character[1:-1]
    return f"[{inner[1:]}]" if inner.startswith("^") else f"[^{inner}]"


def _end_of_group(text: str) -> int:
    """Return the position after the group at the start of a text; 0 if the group is not closed."""
    return next((at + 1 for at, depth in _depths(text) if not depth and text[at] == ")"), 0)


def _outside_groups(text: str) -> str:
    """Return the characters of a pattern outside all groups and classes."""
    return "".join(text[at] for at, depth in _depths(text) if not depth)


def _depths(text: str) -> list[tuple[int, int]]:
    """Return the position and group depth of each character that is not part of an escape or a class."""
    found, depth, at, in_class = [], 0, 0, False
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 2
            continue
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            depth += (character == "(") - (character == ")")
            found.append((at, depth))
        at += 1
    return found


def translate_pattern(pattern: str) -> str:
    """Translate a pattern from ECMA-262 to the syntax of the grammar library.

    Raises:
        PatternError: When it is not regular, or nested too deep.
    """
    parts: list[str] = []
    at, depth = 0, 0
    any_character = "." if _DOT_IS_ANY.search(pattern) else _ANY
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            part, at = _escape(pattern, at)
        elif character == "[":
            part, at = _class(pattern, at)
        else:
            if pattern.startswith(_LOOKAROUNDS, at):
                name = pattern[at : at + (4 if pattern[at + 2] == "<" else 3)]
                raise PatternError(
                    f"it has a lookaround, {name}...). Remedy: write it without one, or leave it out"
                )
            depth += (character == "(") - (character == ")")
            if depth > GROUPS_MAX:
                message = "its groups are nested too deep"
                raise PatternError(
                    limit_message(message, value=depth, limit=GROUPS_MAX, remedy="nest fewer")
                )
            part, at = any_character if character == "." else character, at + 1
        parts.append(part)
    return "".join(parts)


def _escape(pattern: str, at: int, *, in_class: bool = False) -> tuple[str, int]:
    """Translate the escape at a position; return it and the position after it."""
    name = pattern[at + 1 : at + 2]
    if not in_class and (name in set("123456789") or name == "k"):
        raise PatternError("it has a backreference. Remedy: write out the text that it repeats")
    if not in_class and name in {"b", "B"}:
        raise PatternError(
            f"it has a word boundary, \\{name}. Remedy: write the characters around it, or leave it out"
        )
    if name == "u":
        return _unicode(pattern, at)
    if name == "c" and pattern[at + 2 : at + 3].isalpha():
        return f"\\x{{{ord(pattern[at + 2]) % 32:x}}}", at + 3
    known = {"0": r"\x00", "b": r"\x08", "<": "<", ">": ">", "/": "/", "v": r"\x0b"}
    if not in_class:
        known |= {"s": f"[{_SPACE}]", "S": f"[^{_NO_SPACE}]"}
    return known.get(name, "\\" + name), at + 2


def _unicode(pattern: str, at: int) -> tuple[str, int]:
    if match := re.compile(r"\\u\{([0-9a-fA-F]{1,6})\}").match(pattern, at):
        return f"\\x{{{match[1]}}}", match.end()
    pair = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
    if match := pair.match(pattern, at):
        high, low = int(match[1], 16), int(match[2], 16)
        return f"\\x{{{0x10000 + (high - 0xD800 << 10) + low - 0xDC00:x}}}", match.end()
    if match := re.compile(r"\\u([0-9a-fA-F]{4})").match(pattern, at):
        return f"\\x{{{match[1]}}}", match.end()
    return "\\u", at + 2


def _class(pattern: str, at: int) -> tuple[str, int]:
    """Translate the character class at a position; return it and the position after it."""
    start = at
    negated = pattern.startswith("[^", at)
    at += 1 + negated
    parts = ["[^" if negated else "["]
    if pattern.startswith("]", at):
        raise PatternError(
            f"it has an empty character class, {pattern[start : at + 1]}. Remedy: write \\] for a bracket"
        )
    while at < len(pattern) and pattern[at] != "]":
        character = pattern[at]
        if character == "\\":
            part, at = _escape(pattern, at, in_class=True)
            if part == r"\s":
                part = _NO_SPACE if negated else _SPACE
        elif (posix := re.compile(r"\[:\^?\w+:\]").match(pattern, at)) is not None:
            part, at = posix[0], posix.end()
        else:
            doubled = character in "&~-" and parts[-1] == character
            part = "\\" + character if character == "[" or doubled else character
            at += 1
        parts.append(part)
    return "".join(parts) + "]", at + 1
