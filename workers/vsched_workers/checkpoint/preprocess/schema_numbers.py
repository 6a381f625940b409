r"""Conversion of numbers and regular expressions in JSON schemas to what the grammar library represents exactly.

The library parses every number as a 64-bit float and converts ranges to 64-bit integers. Bounds are therefore moved
inwards to numbers that both represent exactly, so that every output satisfies the schema; a constant that is not exact
is refused.

JSON Schema uses ECMA-262, whose syntax and character classes differ slightly from Rust's `regex`: `.` matches fewer
characters, `[` is literal inside a class, `\cA` is a control character; `\d` and `\w` are ASCII. If JavaScript, Python
and Rust disagree about `.` or whitespace, only the characters that all of them accept match.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from vsched.errors import limit_message

INTEGER_MAX = 2**63 - 1024
"""The largest 64-bit float within the range of a 64-bit integer."""
_OPEN_MAX = 9 * 10**17
"""Maximum bound of a half-open range: the library generates such ranges only up to 10^18."""
DECIMALS_MAX = 50
MULTIPLE_MAX = 50_000
"""Maximum of `multipleOf` without its decimal point: each remainder is a state of an automaton."""
_EXACT = 2**53
_NUDGE = 1e-12


class NumberError(ValueError):
    """A number that cannot be used; the message gives the keyword, the reason and the remedy."""


class _Bound(NamedTuple):
    value: Fraction
    exclusive: bool
    keyword: str


def is_number(value: Any) -> bool:
    """Return True for a finite JSON number."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def constant(value: float) -> int | float:
    """Return a number of `const` or `enum` in a form that the library represents exactly.

    Raises:
        NumberError: When there is none.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise NumberError(f"{value} is not a JSON number. Remedy: use a string")
    if value != int(value):
        decimals = len(_digits_after_point(value))
        if decimals <= DECIMALS_MAX and _as_parsed(value) == value:
            return value
        limit = f"{DECIMALS_MAX} decimals" if decimals > DECIMALS_MAX else "15 digits"
        raise NumberError(
            limit_message(
                "the number has too many digits", value=value, limit=limit, remedy="use a string"
            )
        )
    whole = int(_as_written(value))
    if abs(whole) > INTEGER_MAX:
        message = "the integer is outside the supported range of 64-bit integers"
        limit = f"{INTEGER_MAX} (2^63 - 1024)"
    elif int(float(whole)) != whole:
        message = "the integer is not exact as a 64-bit float, which grammars use for numbers"
        limit = f"{_EXACT} (2^53), beyond which some integers are not exact"
    else:
        return whole
    remedy = "use a string, or `type: integer` without this keyword"
    raise NumberError(limit_message(message, value=shown(whole), limit=limit, remedy=remedy))


def shown(value: Any) -> str:
    """Return a value for an error message, shortened."""
    try:
        text = str(value)
    except ValueError:  # Python refuses to convert larger ones
        return "an integer of thousands of digits"
    return text if len(text) <= 40 else f"{text[:40]}... ({len(text)} characters)"


def bounds(schema: dict[str, Any], *, integer: bool) -> dict[str, int | float]:
    """Return range keywords that the library represents exactly, for the same range or a part of it.

    Args:
        schema: The schema, with `minimum`, `maximum`, `exclusiveMinimum` and `exclusiveMaximum`.
        integer: True if it allows integers only.

    Raises:
        NumberError: When the range is empty, or has no number that is exact.
    """
    low, high = _bound(schema, "inimum", 1), _bound(schema, "aximum", -1)
    if low and high:
        _check_range(low, high, integer=integer)
    if low and not high and low.value >= _OPEN_MAX:
        high = _Bound(Fraction(INTEGER_MAX), False, low.keyword)
    if high and not low and high.value <= -_OPEN_MAX:
        low = _Bound(Fraction(-INTEGER_MAX), False, high.keyword)
    found: dict[str, int | float] = {}
    if low:
        found |= _moved(low, integer=integer)
    if high:
        mirrored = _moved(high._replace(value=-high.value), integer=integer)
        found |= {key.replace("inimum", "aximum"): -value for key, value in mirrored.items()}
    if low and high:
        if {"exclusiveMinimum", "exclusiveMaximum"} & found.keys() and high.value - low.value < 1:
            make_inclusive(found)
        least = next(value for key, value in found.items() if key.endswith("inimum"))
        most = next(value for key, value in found.items() if key.endswith("aximum"))
        if least > most:
            raise NumberError(
                f"`{low.keyword}` and `{high.keyword}` have no number between them that is exact as a 64-bit float, "
                f"which grammars use for numbers: values {shown(schema.get(low.keyword))} and "
                f"{shown(schema.get(high.keyword))}, limit {_EXACT} (2^53), beyond which some integers are not exact. "
                "Remedy: use a string (`type: string`), or a wider range"
            )
    return found


def make_inclusive(found: dict[str, int | float]) -> None:
    """Replace exclusive bounds by inclusive ones, slightly inwards.

    In a range shorter than 1 with an exclusive integer bound, the library allows the bound itself.
    """
    for sign, exclusive, inclusive in (
        (1, "exclusiveMinimum", "minimum"),
        (-1, "exclusiveMaximum", "maximum"),
    ):
        if exclusive in found:
            bound = float(found.pop(exclusive))
            following = math.nextafter(bound, sign * math.inf)
            moved = bound + sign * _NUDGE
            found[inclusive] = _readable(following if moved == bound else moved, sign)


def _readable(value: float, sign: int) -> float:
    """Return the nearest float, upwards or downwards, that the library parses exactly from its digits."""
    while _as_parsed(value) != value:
        value = math.nextafter(value, sign * math.inf)
    return value


def _as_parsed(value: float) -> float:
    """Parse the digits of a float like the library's parser, which rounds twice."""
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    whole = float(int("".join(map(str, digits))))
    power = float(f"1e{abs(exponent)}")
    read = whole * power if exponent > 0 else whole / power
    return -read if sign else read


def _as_written(value: float) -> Fraction:
    """Return the decimal value of a number in JSON, from its shortest digits, not the binary value of the float."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def _bound(schema: dict[str, Any], end: str, sign: int) -> _Bound | None:
    """Return the tightest bound on one side."""
    inclusive, exclusive = (f"m{end}", f"exclusiveM{end}")
    found = []
    for keyword in (inclusive, exclusive):
        value = schema.get(keyword)
        if value is None or (keyword == exclusive and isinstance(value, bool)):
            continue  # a boolean, from draft 4, modifies the inclusive keyword
        if not is_number(value):
            raise NumberError(f"`{keyword}` is not a finite number. Remedy: send a number")
        only = keyword == exclusive or schema.get(exclusive) is True
        found.append(_Bound(_as_written(value), only, keyword))
    return max(found, key=lambda each: (sign * each.value, each.exclusive), default=None)


def _check_range(low: _Bound, high: _Bound, *, integer: bool) -> None:
    empty = low.value > high.value or (
        low.value == high.value and (low.exclusive or high.exclusive)
    )
    if integer and not empty:
        least = math.floor(low.value) + 1 if low.exclusive else math.ceil(low.value)
        most = math.ceil(high.value) - 1 if high.exclusive else math.floor(high.value)
        empty = least > most
    if empty:
        kind = "integer" if integer else "number"
        raise NumberError(
            f"`{low.keyword}` and `{high.keyword}` have no {kind} between them. Remedy: correct them"
        )


def _moved(low: _Bound, *, integer: bool) -> dict[str, int | float]:
    """Return a lower bound, moved upwards to a number that the library represents exactly."""
    value, exclusive, keyword = low
    if integer or abs(value) >= _EXACT:
        whole = max(math.floor(value) + 1 if exclusive else math.ceil(value), -INTEGER_MAX)
        if whole <= INTEGER_MAX:
            whole = _exact(whole, short=not integer)
        if whole > INTEGER_MAX:
            message = f"`{keyword}` leaves no 64-bit integer"
            remedy = "use a string (`type: string`), or another bound"
            raise NumberError(
                limit_message(
                    message, value=shown(abs(math.ceil(value))), limit=INTEGER_MAX, remedy=remedy
                )
            )
        return {"minimum": whole}
    if value.denominator == 1:
        return {"exclusiveMinimum" if exclusive else "minimum": int(value)}
    bound = float(value)
    if len(_digits_after_point(bound)) <= DECIMALS_MAX:  # nothing near 5e-324 can be read
        bound = _readable(bound, 1)
    exclusive = exclusive and bound == float(value)
    if len(_digits_after_point(bound)) > DECIMALS_MAX:
        message, limit = f"`{keyword}` has too many decimals", f"{DECIMALS_MAX} decimals"
        raise NumberError(
            limit_message(message, value=bound, limit=limit, remedy="use a rounder number")
        )
    return {"exclusiveMinimum" if exclusive else "minimum": bound}


def _exact(whole: int, *, short: bool) -> int:
    """Return an integer, `whole` or more, that is exact as a float; if `short`, also in the float's shortest digits."""
    factor, rounded = (10 if short else 2), whole
    for power in range(20):
        step: int = factor**power
        rounded = -(-whole // step) * step
        exact = float(rounded)
        if int(exact) == rounded and (not short or int(Decimal(repr(exact))) == rounded):
            break
    return rounded


def multiple_of(value: Any, *, integer: bool) -> tuple[int, int]:
    """Return `multipleOf` as an integer without its decimal point, and the number of its decimals.

    Args:
        value: The value of the keyword.
        integer: True if the schema allows integers only: a multiple of 0.5 is then the same as one of 1.

    Raises:
        NumberError: When it is not a positive number, or has too many digits.
    """
    if not is_number(value) or value <= 0:
        raise NumberError("`multipleOf` is not a number greater than 0. Remedy: send one")
    exact = _as_written(value)
    if integer:
        exact = Fraction(exact.numerator)
    decimals = next(
        (n for n in range(DECIMALS_MAX) if (exact * 10**n).denominator == 1), DECIMALS_MAX
    )
    digits = exact * 10**decimals
    if digits > MULTIPLE_MAX or digits.denominator != 1 or decimals > 30:
        limit = f"{MULTIPLE_MAX}, without the decimal point"
        remedy = "use a smaller or rounder number, or leave it out"
        raise NumberError(
            limit_message(
                "`multipleOf` has too many digits", value=value, limit=limit, remedy=remedy
            )
        )
    return int(digits), decimals


def multiple_as_number(digits: int, decimals: int) -> int | float:
    """Return a number from which the library gets these digits: it multiplies floats by 10 until they are integers."""
    if not decimals:
        return digits
    value: float = digits / 10**decimals
    below = above = value
    for _ in range(8):
        for near in (below, above):
            if _as_read(near) == (digits, decimals) and _as_parsed(near) == near:
                return near
        below, above = math.nextafter(below, 0), math.nextafter(above, math.inf)
    raise NumberError(
        f"{value} is not exact as a 64-bit float. Remedy: use a rounder number, or integers of a smaller unit"
    )


def _as_read(value: float) -> tuple[int, int]:
    decimals = 0
    while value != int(value):
        value *= 10.0
        decimals += 1
    digits = int(value)
    while decimals and digits % 10 == 0:
        digits //= 10
        decimals -= 1
    return digits, decimals


def _digits_after_point(value: float) -> str:
    return format(Decimal(repr(value)), "f").partition(".")[2]


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
