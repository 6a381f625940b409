r"""Rewriting of JSON schemas to a form that the grammar library (llguidance) enforces exactly.

The library refuses many keywords, but misreads some: it computes numbers as 64-bit floats, and it reads patterns as
Rust's `regex` does. `rewrite_schema` returns an equivalent or stricter schema with only the keywords that the library
enforces, or refuses the schema with the keyword, its JSON pointer, the reason and a remedy. Annotations and unknown
keywords are dropped, as JSON Schema specifies.

JSON Schema uses ECMA-262 for patterns. If JavaScript, Python and Rust disagree about `.` or whitespace, only the
characters that all of them accept match.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from vsched.errors import limit_message

Schema = dict[str, Any] | bool

NESTING_MAX = 100
"""Maximum depth of nested objects and lists."""
OPTIONS_MAX = 256
"""Maximum number of options of `oneOf`, which are compared in pairs."""
EXACT = 2**53
"""Integers up to this are exact as 64-bit floats."""
DIGITS_MAX, DECIMALS_MAX = 15, 22
"""Decimal digits of a number, and digits after the point, that parsers of 64-bit floats read exactly."""
MULTIPLE_MAX = 50_000
"""Maximum of an integer `multipleOf`: each remainder is a state of an automaton."""
COUNT_MAX = 2**30
"""Larger counts of characters or items exceed every output."""
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
"""The formats that the library enforces; others are annotations."""
_TYPE_NAMES = ("null", "boolean", "integer", "number", "string", "array", "object")
_TYPES = {
    type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip
_COUNTS = frozenset(
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]
)
_SINGLE = frozenset(["items", "additionalItems", "additionalProperties"])
_LISTS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
_NAMED = frozenset(["properties", "patternProperties", "$defs", "definitions"])
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_CASES = "use anyOf with one option for each case"
_REFUSED = {
    "uniqueItems": "leave it out and check the answer",
    "not": "leave it out, or describe what is allowed",
    "if": _CASES,
    "then": _CASES,
    "else": _CASES,
    "contains": "leave it out, or use prefixItems",
    "dependentRequired": _CASES,
    "dependentSchemas": _CASES,
    "dependencies": _CASES,
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
"""Keywords that the library does not enforce, with the remedy."""


class SchemaError(ValueError):
    """A schema cannot be used; the message has the keyword, its JSON pointer, the reason and a remedy."""


def rewrite_schema(schema: Any) -> Schema:
    """Return the schema to pass to the library, whose option `coerce_one_of` must be set.

    Objects that list their properties get no others, unless the schema allows them or several schemas apply to one
    object.

    Raises:
        SchemaError: When the library cannot enforce the schema.
    """
    return _Rewriter(schema).rewritten()


class _Rewriter:
    """The rewriting of one document; pointers of schemas are the same before and after."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._made: dict[str, Schema] = {}
        self._references: list[tuple[str, Any]] = []
        self._one_of: list[tuple[str, dict[str, Any], Any]] = []
        self._open: list[dict[str, Any]] = []
        self._combines = False

    def rewritten(self) -> Schema:
        made = self._schema(self._root, "", 1)
        for pointer, reference in self._references:
            if not isinstance(reference, str) or _pointer(reference) not in self._made:
                raise _refused(pointer, "is not a schema of this document", "use #/$defs/name")
        for node in self._open if not self._combines else ():
            node["additionalProperties"] = False
        for pointer, node, tag in self._one_of:
            self._check_one_of(pointer, node, tag)
        return made

    def _schema(self, node: Any, pointer: str, depth: int) -> Schema:
        if depth > NESTING_MAX:
            remedy = "put inner schemas under $defs, and refer to them"
            raise _beyond("the schema is nested too deep", f"{depth} or more", NESTING_MAX, remedy)
        if not isinstance(node, dict | bool):
            raise SchemaError(
                f"{pointer or 'the root'} is not a schema. Remedy: send an object, true or false"
            )
        if isinstance(node, dict) and node.get("not") in (True, {}) and "not" in node:
            node = False
        made: dict[str, Any] = {}
        self._made[pointer] = made if isinstance(node, dict) else node
        if isinstance(node, dict):
            for keyword, value in node.items():
                self._add(made, keyword, value, node, f"{pointer}/{_step(keyword)}", depth + 1)
            self._finish(made, node, pointer)
        return self._made[pointer]

    def _add(
        self,
        made: dict[str, Any],
        keyword: str,
        value: Any,
        node: dict[str, Any],
        at: str,
        depth: int,
    ) -> None:
        """Add one keyword of `node` to `made`, including its subschemas."""
        if keyword in _REFUSED and not (keyword == "uniqueItems" and value is False):
            raise _refused(at, "is not supported", _REFUSED[keyword])
        if keyword in _LISTS and isinstance(value, list):
            made[keyword] = [
                self._schema(each, f"{at}/{index}", depth) for index, each in enumerate(value)
            ]
        elif keyword in _SINGLE:
            made[keyword] = self._schema(value, at, depth)
        elif keyword in _LISTS:
            raise _refused(at, "is not a list of schemas", "send one")
        elif keyword in _NAMED:
            if not isinstance(value, dict):
                raise _refused(at, "is not an object of schemas", "send one")
            inner = {
                name: self._schema(each, f"{at}/{_step(name)}", depth)
                for name, each in value.items()
            }
            if keyword == "patternProperties":
                inner = {_translated(name, at): each for name, each in inner.items()}
            made[keyword] = inner
        elif keyword == "$ref":
            self._references.append((at, value))
            made[keyword] = value
        elif keyword == "$id" and depth > 2:
            raise _refused(at, "is supported only in the root", "use $ref with #/$defs/name")
        else:
            _add_value(made, keyword, value, node, at)

    def _finish(self, made: dict[str, Any], node: dict[str, Any], pointer: str) -> None:
        """Add the keywords that depend on each other."""
        _add_bounds(made, node, pointer, _LOWER, 1)
        _add_bounds(made, node, pointer, _UPPER, -1)
        if "pattern" in node:
            made["pattern"], *others = patterns_of(node["pattern"], f"{pointer}/pattern")
            made["allOf"] = [*made.get("allOf", ()), *({"pattern": each} for each in others)]
        if "propertyNames" in node:
            self._add_names(made, node["propertyNames"], f"{pointer}/propertyNames")
        needed, listed = made.get("required", []), made.get("properties")
        closed = made.get("additionalProperties") is False and "patternProperties" not in made
        least = made.get("minProperties", 0)
        if type(least) is int and least - len(needed) > 1 and not closed:
            # An output could reach the count by repeating a property.
            remedy = "list the properties in `required`, or ask for fewer"
            message = (
                f"{pointer}/minProperties asks for too many properties that are not in `required`"
            )
            raise _beyond(message, least - len(needed), 1, remedy)
        if "oneOf" in made:
            tag = node.get("discriminator")
            tag = tag.get("propertyName") if isinstance(tag, dict) else None
            self._one_of.append((f"{pointer}/oneOf", made, tag))
        is_object, parts = "properties" in node or "required" in node, node.get("allOf", ())
        siblings = is_object and {"$ref", "allOf", "anyOf", "oneOf"} & node.keys()
        self._combines |= "patternProperties" in node or len(parts) > 1 or bool(siblings)
        says = {"additionalProperties", "patternProperties", "minProperties"} & made.keys()
        if listed is not None and not says and set(needed) <= listed.keys():
            self._open.append(made)

    def _add_names(self, made: dict[str, Any], rules: Any, at: str) -> None:
        """Replace `propertyNames` by `properties` or `patternProperties`."""
        if isinstance(rules, dict) and isinstance(rules.get("$ref"), str):
            rules = self._found(rules["$ref"])
        rules = {} if rules is True else rules
        said = rules.keys() - {"type", "title", "description"} if isinstance(rules, dict) else {"?"}
        rest = made.get("additionalProperties", True)
        if not said and rules.get("type", "string") == "string":
            return
        if "patternProperties" in made:
            said = {"?"}
        if said in ({"enum"}, {"const"}) and "properties" not in made:
            names = [each for each in _values(rules) or () if isinstance(each, str)]
            made["properties"] = dict.fromkeys(names, rest)
        elif said == {"pattern"} and "properties" not in made:
            made["patternProperties"] = {_translated(rules["pattern"], at): rest}
        else:
            reason = "is supported with `enum`, `const` or `pattern`, and without listed properties"
            raise _refused(at, reason, "list the properties")
        made["additionalProperties"] = False

    def _found(self, reference: str) -> Any:
        """Return the schema in the sent document that a reference points to; None if there is none."""
        found = self._root
        for step in (_pointer(reference) or "").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def _check_one_of(self, pointer: str, node: dict[str, Any], tag: Any) -> None:
        """Check that an output of one option matches no other; with a tag, each option must have the property."""
        options = node["oneOf"]
        if len(options) > OPTIONS_MAX:
            raise _beyond(f"{pointer} has too many options", len(options), OPTIONS_MAX, "use anyOf")
        targets = [self._target(each) for each in options]
        for index, target in enumerate(targets):
            needed = target.get("required", [])
            if isinstance(tag, str) and tag in target.get("properties", {}) and tag not in needed:
                options[index] = targets[index] = {**target, "required": [*needed, tag]}
        for (at, first), (other, second) in itertools.combinations(enumerate(targets), 2):
            if not self._disjoint(first, second):
                reason = (
                    f"is supported if its options exclude each other by type, const, enum or a required property: "
                    f"{at} and {other} may not"
                )
                raise _refused(pointer, reason, "use anyOf")

    def _target(self, node: Schema) -> dict[str, Any]:
        """Follow references, as far as they have no other keywords; `false` matches nothing, like an empty `enum`."""
        for _ in range(NESTING_MAX):
            if not isinstance(node, dict) or node.keys() != {"$ref"}:
                break
            node = self._made[_pointer(node["$ref"]) or ""]
        return node if isinstance(node, dict) else {} if node else {"enum": []}

    def _disjoint(self, first: dict[str, Any], second: dict[str, Any]) -> bool:
        types = _types(first) & _types(second)
        if not types or _differ(first, second):
            return True
        if types != {"object"}:
            return False
        both = ((first, second), (second, first))
        if all(_lacks(one, other) for one, other in both):
            return True
        shared = {name for name in first.get("required", ()) if name in second.get("required", ())}
        held, others = first.get("properties", {}), second.get("properties", {})
        return any(
            _differ(self._target(held[name]), self._target(others[name]))
            for name in shared & held.keys() & others.keys()
        )


def _add_value(
    made: dict[str, Any], keyword: str, value: Any, node: dict[str, Any], at: str
) -> None:
    """Add a keyword without subschemas; annotations and unknown keywords are dropped."""
    if keyword == "required":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _refused(at, "is not a list of names", "send one")
        made[keyword] = value
    elif keyword == "type":
        made[keyword] = _checked_type(value, at)
    elif keyword in _COUNTS:
        count = _checked_count(value, at)
        if not (keyword.startswith("max") and count >= COUNT_MAX):
            made[keyword] = count
    elif keyword in {"const", "enum"}:
        if keyword == "enum" and not isinstance(value, list):
            raise _refused(at, "is not a list", "send the allowed values as one")
        made[keyword] = _constant(value, at)
    elif keyword == "format":
        # With a pattern, a format is an annotation: zod's patterns of dates and times disagree with RFC 3339.
        if "pattern" not in node and isinstance(value, str) and value in FORMATS:
            made[keyword] = value
    elif keyword == "multipleOf":
        made[keyword] = _checked_multiple(value, at)


def _checked_type(value: Any, at: str) -> Any:
    kinds = value if isinstance(value, list) else [value]
    if not kinds or any(kind not in _TYPE_NAMES for kind in kinds):
        limit, remedy = ", ".join(_TYPE_NAMES), "send one of these, or a list of them"
        raise _beyond(f"{at} is not a type", json.dumps(value)[:100], limit, remedy)
    return value


def _checked_count(value: Any, at: str) -> int:
    if type(value) not in {int, float} or value < 0 or value % 1 != 0:
        shown = json.dumps(value)[:100]
        raise _beyond(f"{at} is not a count", shown, "an integer from 0", "send one")
    return int(value)


def _checked_multiple(value: Any, at: str) -> int | float:
    found = _number(value, at)
    what = "" if found > 0 else "is not positive"
    scaled = found
    while scaled != int(scaled):  # as the library does: 0.07 becomes 7000000000000001
        scaled *= 10
    if scaled != found and scaled >= 2**32:
        what = "has too many digits as a 64-bit float"
    if what:
        remedy = "use such a number, or leave it out and check the answer"
        raise _beyond(f"{at} {what}", value, "numbers such as 3, 0.5 or 0.01", remedy)
    if Decimal(str(value)).as_integer_ratio()[0] > MULTIPLE_MAX:
        remedy = "use a smaller or rounder number, or leave it out"
        raise _beyond(f"{at} is too large", value, MULTIPLE_MAX, remedy)
    return found


def _lacks(node: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if no output of an object has all properties that another object requires."""
    closed = node.get("additionalProperties") is False and "patternProperties" not in node
    return closed and not set(other.get("required", ())) <= node.get("properties", {}).keys()


def _differ(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return True if both schemas list their values, and have none in common, or have no type in common."""
    values, others = _values(first), _values(second)
    if values is not None and others is not None:
        return not {_text(each) for each in values} & {_text(each) for each in others}
    return not _types(first) & _types(second)


def _values(node: dict[str, Any]) -> list[Any] | None:
    held = [node["const"]] if "const" in node else node.get("enum")
    return held if isinstance(held, list) else None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _types(node: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows; `integer` counts as `number`."""
    kinds = node.get("type", [*_TYPES.values()])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    found = {"number" if each == "integer" else str(each) for each in kinds}
    values = _values(node)
    return frozenset(found if values is None else found & {_TYPES[type(each)] for each in values})


def _pointer(reference: str) -> str | None:
    """Return the JSON pointer of a reference; None for a reference to another document or an anchor."""
    pointer = unquote(reference.removeprefix("#"))
    return pointer if reference.startswith("#") and (not pointer or pointer[0] == "/") else None


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _refused(at: str, reason: str, remedy: str) -> SchemaError:
    return SchemaError(f"{at} {reason}. Remedy: {remedy}")


def _beyond(message: str, value: Any, limit: Any, remedy: str) -> SchemaError:
    return SchemaError(limit_message(message, value=value, limit=limit, remedy=remedy))


def _constant(value: Any, at: str) -> Any:
    """Return a value of `const` or `enum`; its numbers must be exact as 64-bit floats."""
    if isinstance(value, dict):
        return {name: _constant(each, f"{at}/{_step(name)}") for name, each in value.items()}
    if isinstance(value, list):
        return [_constant(each, f"{at}/{index}") for index, each in enumerate(value)]
    return _number(value, at) if type(value) in {int, float} else value


def _number(value: Any, at: str) -> int | float:
    """Return a number in the form that the library reads exactly."""
    if type(value) is not int and (type(value) is not float or not math.isfinite(value)):
        raise _refused(at, "is not a number", "send one")
    if abs(value) <= EXACT:
        if value == int(value):
            return int(value)
        _, digits, exponent = Decimal(repr(value)).as_tuple()
        if len(digits) <= DIGITS_MAX and -int(exponent) <= DECIMALS_MAX:
            return value
    limit = f"2^53, {DIGITS_MAX} digits and {DECIMALS_MAX} decimals"
    shown = str(value) if abs(value) < 10**40 else "a number of many digits"
    remedy = "use a string, or a rounder number"
    raise _beyond(f"{at} is not exact as a 64-bit float", shown, limit, remedy)


def _add_bounds(
    made: dict[str, Any], node: dict[str, Any], pointer: str, keywords: tuple[str, str], sign: int
) -> None:
    """Add the bounds of numbers on one side: exact, and inclusive unless only integers are allowed.

    Bounds beyond 2^53 are moved inwards. In a range shorter than 1 with an exclusive integer bound, the library allows
    the bound itself; therefore exclusive bounds are moved as well, by 1e-9 or 1e-12 of the bound.
    """
    inclusive, exclusive = keywords
    for keyword in keywords:
        value: Any = node.get(keyword)
        at = f"{pointer}/{keyword}"
        if keyword not in node or (keyword == exclusive and isinstance(value, bool)):
            continue  # a boolean, from draft 4, modifies the inclusive keyword
        if type(value) in {int, float} and sign * value < -EXACT:
            value = -sign * EXACT
        bound = _number(value, at)
        if keyword == exclusive or node.get(exclusive) is True:
            if node.get("type") == "integer":
                bound = _number(math.floor(bound) + 1 if sign > 0 else math.ceil(bound) - 1, at)
            else:
                moved = bound + sign * max(1e-9, abs(bound) * 1e-12)
                bound = _number(float(f"{moved:.{DIGITS_MAX}g}"), at)
        if inclusive in made:
            bound = sign * max(sign * bound, sign * made[inclusive])
        made[inclusive] = bound


_ANY = r"[^\n\r\x{2028}\x{2029}]"
_SPACE, _NO_SPACE = r"[\t\n\x0b\x0c\r ]", r"[^\s\x1c-\x1f\x{feff}]"
_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
"""ECMA-262's classes of digits and letters; the library's are Unicode's outside of JSON."""
_ESCAPES = _ASCII | {r"\s": _SPACE, r"\S": _NO_SPACE}
_NEGATED = _ASCII | {r"\s": r"[\s\x1c-\x1f\x{feff}]", r"\S": r"[^\t\n\x0b\x0c\r ]"}
"""Classes within negated classes; whitespace is all characters that some validator treats as such."""
_NOT_REGULAR = re.compile(r"\\[bB1-9]|\(\?<?[=!]")
_PARTS = re.compile(r"\\.|\.|\(\?<?[=!]|\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)
_HEADS = {
    r"(?!^[-+.]*$)": r"[^-+.]",
    r"(?!\.)": r"^(?:$|[^.])",
    r"(?!.*\.\.)": r"^(?:\.?[^.])*\.?$",
}
"""Lookaheads at the start of a pattern, in pydantic's `Decimal` and zod's `email`, with equivalent patterns."""
_DECIMAL = re.compile(
    r"\[\+-\]\?0\*\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)\\d\{0,\d+\}\\\.\\d\{0,(\d+)\}0\*\$\)"
)
"""Pydantic's pattern of a `Decimal` with `max_digits` and `decimal_places`."""


def patterns_of(pattern: Any, at: str = "pattern") -> list[str]:
    """Translate a pattern from ECMA-262 to patterns for the grammar library, all of which a string must match.

    Raises:
        SchemaError: When it is not a pattern; the library refuses what is not regular.
    """
    found, rest = [], pattern.removeprefix("^") if isinstance(pattern, str) else ""
    while head := next((each for each in _HEADS if rest.startswith(each)), ""):
        found.append(_HEADS[head])
        rest = rest.removeprefix(head)
    if not found or not pattern.startswith("^") or _has_alternatives(rest):
        return [_translated(pattern, at)]
    if match := _DECIMAL.fullmatch(rest):
        rest = rf"[+-]?\d{{0,{match[1]}}}(?:\.\d{{0,{match[2]}}})?$"
    return [_translated(each, at) for each in ["^" + rest, *found]]


def _has_alternatives(pattern: str) -> bool:
    """Return True if a pattern has alternatives outside groups."""
    text = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern)
    while (less := re.sub(r"\([^()]*\)", "", text)) != text:
        text = less
    return "|" in text


def _translated(pattern: Any, at: str) -> str:
    if not isinstance(pattern, str):
        raise _refused(at, "is not a string", "send a regular expression")

    def part(match: re.Match[str]) -> str:
        text = match[0]
        if text == ".":
            return _ANY
        if _NOT_REGULAR.fullmatch(text):
            remedy = "use a pattern without lookarounds, backreferences and \\b"
            raise _refused(at, f"has {text}, which is not supported", remedy)
        if text[0] in "\\(":
            return _ESCAPES.get(text, text)
        begin = "[^" if text[1] == "^" else "["
        spaces = _NEGATED if begin == "[^" else _ESCAPES
        inner = text[len(begin) : -1]
        if not inner:
            raise _refused(at, f"has an empty character class, {text}", r"write \] for a bracket")
        # Rust's classes nest, and have operators.
        inner = re.sub(
            r"\\.|\[|([&~-])(?=\1)",
            lambda each: spaces.get(each[0], each[0] if len(each[0]) > 1 else "\\" + each[0]),
            inner,
            flags=re.DOTALL,
        )
        return f"{begin}{inner}]"

    return _PARTS.sub(part, pattern)
