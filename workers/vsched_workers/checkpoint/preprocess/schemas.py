"""Rewriting of JSON schemas to a form that the grammar library enforces exactly.

The library ignores or misreads some keywords, and crashes on some schemas. `rewrite_schema` returns an equivalent or
stricter schema with only the keywords that the library enforces, or refuses the schema with the keyword, its JSON
pointer, the reason and a remedy. Annotations and unknown keywords are dropped, as JSON Schema specifies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from vsched.errors import limit_message
from vsched_workers.checkpoint.preprocess.disjoint import Disjointness, LocatedSchema, longest_chain
from vsched_workers.checkpoint.preprocess.schema_numbers import (
    MULTIPLE_MAX,
    NumberError,
    PatternError,
    bounds,
    constant,
    make_inclusive,
    multiple_as_number,
    multiple_of,
    shown,
    split_lookaheads,
    translate_pattern,
)

Schema = dict[str, Any] | bool

NESTING_MAX = 100
"""Maximum depth of nested objects and lists."""
CHAIN_MAX = 400
"""Maximum depth of schemas through references, which the library follows recursively (900 need 4 MiB of stack)."""
PATTERNS_MAX = 100
"""Maximum number of `patternProperties`: the library compares each with every other."""
COUNT_MAX = 2**30
"""Larger counts of characters or items exceed every output."""
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
"""The formats that the library enforces; others are annotations."""
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties",
    "contains", "not", "if", "then", "else", "propertyNames",
)  # fmt: skip
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_APPLICATORS = frozenset(
    ["$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas", "$dynamicRef", "contains"]
)  # fmt: skip
_NAMES_BY_FORMAT = {
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
}
"""Patterns for property names with a format; dates end at day 28, which every month has."""


class SchemaError(ValueError):
    """A schema cannot be used; the message has the keyword, its JSON pointer, the reason and a remedy."""


def rewrite_schema(schema: Any) -> Schema:
    """Return the schema to pass to the library.

    Raises:
        SchemaError: When the library cannot enforce the schema.
    """
    _check_nesting(schema)
    return _SchemaRewriter(schema).run()


def _check_nesting(schema: Any) -> None:
    waiting = [(schema, 1)]
    while waiting:
        node, depth = waiting.pop()
        if depth > NESTING_MAX:
            remedy = "put inner schemas under $defs, and refer to them"
            raise SchemaError(
                limit_message(
                    "the schema is nested too deep",
                    value=f"{depth} or more",
                    limit=NESTING_MAX,
                    remedy=remedy,
                )
            )
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        waiting += ((each, depth + 1) for each in inner if isinstance(each, dict | list))


class _Resources:
    """The schemas of a document, by `$id` and `$anchor`, and the base URI of each."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}
        waiting = [(root, "")]
        while waiting:
            node, base = waiting.pop()
            if not isinstance(node, dict):
                continue
            name = node.get("$id")
            if isinstance(name, str) and name.startswith("#"):
                self._anchors.setdefault((base, name[1:]), node)
            elif isinstance(name, str):
                base = urldefrag(_joined(base, name))[0]
                self._resources.setdefault(base, node)
            if isinstance(anchor := node.get("$anchor"), str):
                self._anchors.setdefault((base, anchor), node)
            self._bases[id(node)] = base
            waiting += ((each, base) for _, each in _parts(node))

    def base_of(self, node: Any, otherwise: str) -> str:
        """Return the base URI of the references in a schema."""
        return self._bases.get(id(node), otherwise)

    def find(self, reference: Any, place: LocatedSchema) -> LocatedSchema:
        """Resolve a reference in a place."""
        if not isinstance(reference, str):
            raise SchemaError(
                f"{_at(place, '$ref')} is not a string. Remedy: send one such as #/$defs/name"
            )
        url, fragment = urldefrag(_joined(place.base, reference))
        if url not in self._resources:
            raise SchemaError(
                f"{_at(place, '$ref')} points outside the schema, to {reference[:200]}, and nothing is fetched. "
                "Remedy: put that schema under $defs, and refer to it with #/$defs/name"
            )
        node = self._resources[url]
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            node = self._anchors.get((url, fragment))
            steps = []
        else:
            steps = fragment.split("/")[1:]
        for step in steps:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(step)
            elif isinstance(node, list):
                node = node[int(step)] if step.isdecimal() and int(step) < len(node) else None
        if not isinstance(node, dict | bool):
            raise SchemaError(
                f"{_at(place, '$ref')} does not point to a schema: {reference[:200]}. "
                "Remedy: correct it, as in #/$defs/name"
            )
        return LocatedSchema(
            node, fragment if url in {"", place.base} else reference, self.base_of(node, url)
        )


def _joined(base: str, reference: str) -> str:
    return base + reference if reference.startswith("#") else urljoin(base, reference)


def _parts(node: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the direct subschemas of a schema, with the steps of their JSON pointers."""
    for keyword, held in node.items():
        if keyword in _NAMED and isinstance(held, dict):
            yield from (((keyword, name), each) for name, each in held.items())
        elif keyword in {*_LISTS, "items"} and isinstance(held, list):
            yield from (((keyword, str(index)), each) for index, each in enumerate(held))
        elif keyword in _SINGLE:
            yield (keyword,), held


def _at(place: LocatedSchema, keyword: str) -> str:
    return f"`{keyword}` at {_step(place.pointer, keyword)}"


def _step(pointer: str, *steps: str) -> str:
    for step in steps:
        pointer += "/" + step.replace("~", "~0").replace("/", "~1")
    return pointer


class _SchemaRewriter:
    """The rewriting of one document."""

    def __init__(self, root: Any) -> None:
        self._resources = _Resources(root)
        self._root = root
        self._names: dict[int, str] = {id(root): "#"}
        self._waiting: list[tuple[str, LocatedSchema]] = []
        self._tagged: dict[tuple[int, str], dict[str, Any]] = {}
        self._current = "#"
        self._depths: dict[str, int] = {}
        self._references: dict[str, dict[str, int]] = {}
        self._multiples: set[tuple[int, int]] = set()
        self._combines = False
        self._bounded: list[dict[str, Any]] = []
        self._disjointness = Disjointness(self._resources.find)

    def run(self) -> Schema:
        base = self._resources.base_of(self._root, "")
        made = self._walked_whole("#", LocatedSchema(self._root, "", base))
        found: dict[str, Schema] = {}
        while self._waiting:
            name, place = self._waiting.pop()
            found[name] = self._walked_whole("#/$defs/" + name, place)
        chain, names = longest_chain(self._depths, self._references)
        if chain > CHAIN_MAX:
            through = ", ".join(name.rpartition("/")[2] for name in names[:3])
            remedy = "use fewer schemas that refer to each other"
            raise SchemaError(
                limit_message(
                    f"schemas are nested too deep through `$ref` ({through} ...)",
                    value=chain,
                    limit=CHAIN_MAX,
                    remedy=remedy,
                )
            )
        self._check_multiples()
        for each in self._bounded if self._combines else ():
            make_inclusive(each)
        if isinstance(made, dict) and found:
            made["$defs"] = found
        return made

    def _walked_whole(self, name: str, place: LocatedSchema) -> Schema:
        self._current = name
        self._depths[name] = 1
        self._references[name] = {}
        return self._walked(place, 1)

    def _check_multiples(self) -> None:
        """Refuse values of `multipleOf` whose common multiple, which the library may need, exceeds its limit."""
        decimals = max((each for _, each in self._multiples), default=0)
        common = math.lcm(*(digits * 10 ** (decimals - own) for digits, own in self._multiples))
        if self._combines and common > MULTIPLE_MAX:
            values = ", ".join(
                str(multiple_as_number(*each)) for each in sorted(self._multiples)[:4]
            )
            remedy = "use one value of `multipleOf`, or schemas without allOf"
            raise SchemaError(
                limit_message(
                    f"the common multiple of `multipleOf` {values} is too large",
                    value=common,
                    limit=MULTIPLE_MAX,
                    remedy=remedy,
                )
            )

    def _walked(self, place: LocatedSchema, depth: int) -> Schema:
        """Rewrite the schema of a place, including its subschemas."""
        self._depths[self._current] = max(self._depths[self._current], depth)
        if isinstance(place.schema, bool):
            return place.schema
        if not isinstance(place.schema, dict):
            where = place.pointer or "the root"
            raise SchemaError(f"{where} is not a schema. Remedy: send an object, true or false")
        if place.schema.get("not") in (True, {}):
            return False
        base = self._resources.base_of(place.schema, place.base)
        place = LocatedSchema(_without_trivial(place.schema), place.pointer, base)
        for keyword, remedy in _UNSERVED.items():
            if keyword in place.schema:
                raise SchemaError(f"{_at(place, keyword)} is not supported. Remedy: {remedy}")
        made = self._written(place, depth)
        if "propertyNames" in made:
            _name_properties(made, place)
        _check_free_names(made, place)
        if "patternProperties" in made and "additionalProperties" in made:
            made = _together(made, "patternProperties", "additionalProperties")
        used = len(made.get("allOf", ())) + len({"$ref", "anyOf"} & made.keys())
        self._combines |= used > 1 or (
            used == 1 and bool({"multipleOf", "patternProperties"} & made.keys())
        )
        return made

    def _written(self, place: LocatedSchema, depth: int) -> dict[str, Any]:
        """Rewrite each keyword; annotations and unknown keywords are dropped."""
        made: dict[str, Any] = {}
        for keyword, value in place.schema.items():
            try:
                if keyword in _PLAIN:
                    _PLAIN[keyword](made, keyword, value, place)
                elif keyword in self._INNER:
                    self._INNER[keyword](self, made, keyword, value, place, depth)
            except (NumberError, PatternError) as error:
                raise SchemaError(f"{_at(place, keyword)}: {error}") from None
        return made

    def _inner(self, place: LocatedSchema, depth: int, value: Any, *steps: str) -> Schema:
        return self._walked(
            LocatedSchema(value, _step(place.pointer, *steps), place.base), depth + 1
        )

    def _add_reference(
        self, made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema, depth: int
    ) -> None:
        target = self._resources.find(value, place)
        if isinstance(target.schema, bool):
            made.setdefault("allOf", []).append(target.schema)
            return
        made["$ref"] = self._reference(target, depth)

    def _reference(self, target: LocatedSchema, depth: int) -> str:
        """Return a reference to a schema, and queue the schema to be written under `$defs`."""
        key = id(target.schema)
        if key not in self._names:
            last = (
                re.sub(r"[^A-Za-z0-9_.-]", "_", target.pointer.rpartition("/")[2])[:64] or "schema"
            )
            name = last
            while f"#/$defs/{name}" in self._names.values():
                name = f"{last}-{len(self._names)}"
            self._names[key] = f"#/$defs/{name}"
            self._waiting.append((name, target))
        reached = self._references[self._current]
        name = self._names[key]
        reached[name] = max(reached.get(name, 0), depth + 1)
        return name

    def _list(self, keyword: str, value: Any, place: LocatedSchema, depth: int) -> list[Schema]:
        _check_list(value, keyword, place, empty=keyword == "prefixItems")
        return [self._inner(place, depth, each, keyword, str(at)) for at, each in enumerate(value)]

    def _add_one_of(
        self, made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema, depth: int
    ) -> None:
        """Add `oneOf` as `anyOf`, if its options are disjoint."""
        _check_list(value, "oneOf", place)
        places = [
            LocatedSchema(each, _step(place.pointer, "oneOf", str(at)), place.base)
            for at, each in enumerate(value)
        ]
        tag = place.schema.get("discriminator")
        tag = tag.get("propertyName") if isinstance(tag, dict) else None
        if isinstance(tag, str):
            places = [self._with_tag(each, tag) for each in places]
        overlap = self._disjointness.overlapping(places)
        if overlap:
            first, second = (_step(place.pointer, "oneOf", str(at)) for at in overlap)
            raise SchemaError(
                f"{_at(place, 'oneOf')}: {first} and {second} may match the same value, and exactly one must. Remedy: "
                "use anyOf, or give the options different types or a required property with a different `const`"
            )
        _add_options(made, [self._option(each, depth) for each in places])

    def _option(self, place: LocatedSchema, depth: int) -> Schema:
        if any(place.schema is each for each in self._tagged.values()):
            return {"$ref": self._reference(place, depth + 1)}
        return self._walked(place, depth + 1)

    def _with_tag(self, place: LocatedSchema, tag: str) -> LocatedSchema:
        """Return an option of a discriminated union with its tag required, which pydantic does not do for a default."""
        target = self._followed(place)
        node = target.schema
        needed = node.get("required", []) if isinstance(node, dict) else None
        if (
            not isinstance(needed, list)
            or tag in needed
            or tag not in (node.get("properties") or {})
        ):
            return place
        key = (id(node), tag)
        if key not in self._tagged:
            self._tagged[key] = {**node, "required": [*needed, tag]}
        return LocatedSchema(self._tagged[key], target.pointer, target.base)

    def _add_list(
        self, made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema, depth: int
    ) -> None:
        inner = self._list(keyword, value, place, depth)
        if keyword == "anyOf":
            _add_options(made, inner)
        else:
            made[keyword] = [*made.get(keyword, ()), *inner]

    def _add_inner(
        self, made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema, depth: int
    ) -> None:
        made[keyword] = self._inner(place, depth, value, keyword)

    def _add_multiple(
        self, made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema, depth: int
    ) -> None:
        integer = _is_integer(place.schema)
        found = multiple_of(value, integer=integer)
        if found != (1, 0) or not integer:
            made[keyword] = multiple_as_number(*found)
            self._multiples.add(found)

    def _add_bounds(
        self, made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema, depth: int
    ) -> None:
        if not set(_NUMBERS) & made.keys():
            made.update(bounds(place.schema, integer=_is_integer(place.schema)))
            self._bounded.append(made)

    def _add_items(
        self, made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema, depth: int
    ) -> None:
        if not isinstance(value, list):
            made["items"] = self._inner(place, depth, value, "items")
            return
        made["prefixItems"] = [
            self._inner(place, depth, each, "items", str(at)) for at, each in enumerate(value)
        ]
        if "additionalItems" in place.schema:
            made["items"] = self._inner(
                place, depth, place.schema["additionalItems"], "additionalItems"
            )

    def _add_properties(
        self, made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema, depth: int
    ) -> None:
        if not isinstance(value, dict):
            raise SchemaError(
                f"{_at(place, keyword)} is not an object of schemas. Remedy: send one"
            )
        inner = {
            name: self._inner(place, depth, each, keyword, name) for name, each in value.items()
        }
        if keyword == "patternProperties":
            if len(value) > PATTERNS_MAX:
                message, remedy = f"{_at(place, keyword)} has too many patterns", "use fewer"
                raise SchemaError(
                    limit_message(message, value=len(value), limit=PATTERNS_MAX, remedy=remedy)
                )
            inner = {translate_pattern(name): each for name, each in inner.items()}
        made[keyword] = inner

    def _add_names(
        self, made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema, depth: int
    ) -> None:
        target = self._followed(LocatedSchema(value, _step(place.pointer, keyword), place.base))
        if rules := _rules_of_names(target.schema, place):
            made[keyword] = rules

    def _followed(self, place: LocatedSchema) -> LocatedSchema:
        """Follow `$ref` to its target, through chains of references."""
        for _ in range(CHAIN_MAX):
            if not isinstance(place.schema, dict) or "$ref" not in place.schema:
                break
            place = self._resources.find(place.schema["$ref"], place)
        return place

    _INNER: ClassVar[dict[str, Callable[..., None]]] = {
        "$ref": _add_reference,
        "allOf": _add_list,
        "anyOf": _add_list,
        "oneOf": _add_one_of,
        "prefixItems": _add_list,
        "items": _add_items,
        "properties": _add_properties,
        "patternProperties": _add_properties,
        "additionalProperties": _add_inner,
        "propertyNames": _add_names,
        "multipleOf": _add_multiple,
        **dict.fromkeys(_NUMBERS, _add_bounds),
    }
    """Keywords with subschemas, and keywords that need the state of the document."""


def _without_trivial(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without unsupported keywords that have no effect, or are equivalent to a supported keyword."""
    node = dict(schema)
    if node.get("not") is False:
        del node["not"]
    if "if" not in node or all(node.get(key, True) in (True, {}) for key in ("then", "else")):
        _leave_out(node, "if", "then", "else")
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        held = node.get(keyword)
        if isinstance(held, dict) and all(each in ([], {}, True) for each in held.values()):
            del node[keyword]
    if "contains" not in node or (node.get("minContains") == 0 and "maxContains" not in node):
        _leave_out(node, "contains")
    most: Any = node.get("maxItems")
    if node.get("uniqueItems") is False or (_is_count(most) and most <= 1):
        _leave_out(node, "uniqueItems")
    for keyword, plain in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        if node.get(keyword, True) in (True, {}) or (
            plain in node and not isinstance(node[plain], list)
        ):
            _leave_out(node, keyword)
        elif plain not in node and not _APPLICATORS & node.keys():
            node[plain] = node.pop(keyword)
    return node


def _leave_out(node: dict[str, Any], *keywords: str) -> None:
    for keyword in keywords:
        node.pop(keyword, None)


def _rules_of_names(node: Any, place: LocatedSchema) -> dict[str, Any]:
    """Return the keywords of `propertyNames` that apply to names."""
    if isinstance(node, bool):
        return {} if node else {"enum": []}
    if not isinstance(node, dict):
        raise SchemaError(f"{_at(place, 'propertyNames')} is not a schema. Remedy: send one")
    kinds = node.get("type", "string")
    if kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
        return {"enum": []}
    rules = {key: node[key] for key in _RULES_OF_NAMES if key in node}
    if rules.get("format", "") not in FORMATS:
        rules.pop("format", None)
    unknown = _ASSERTIONS & node.keys() - _RULES_OF_NAMES
    if unknown or (len(rules) > 1 and rules.keys() != {"minLength", "maxLength"}):
        _refuse_names(place)
    return rules


def _refuse_names(place: LocatedSchema) -> NoReturn:
    raise SchemaError(
        f"{_at(place, 'propertyNames')} is supported with a list of names (enum), or a pattern or lengths without "
        "properties and patternProperties. Remedy: list the properties, or use patternProperties with "
        "additionalProperties: false"
    )


def _name_properties(made: dict[str, Any], place: LocatedSchema) -> None:
    """Replace `propertyNames` by `properties` or `patternProperties`."""
    rules = made.pop("propertyNames")
    listed = made.get("properties", {})
    rest = made.pop("additionalProperties", True)
    if "patternProperties" in made:
        _refuse_names(place)
    if "enum" in rules or "const" in rules:
        names = rules.get("enum", [rules.get("const")])
        if not isinstance(names, list):
            _refuse_names(place)
        allowed = [each for each in names if isinstance(each, str)]
        made["properties"] = {
            **{name: each if name in allowed else False for name, each in listed.items()},
            **{name: rest for name in allowed if name not in listed},
        }
    else:
        if listed:
            _refuse_names(place)
        made["patternProperties"] = {_pattern_of_names(rules, place): rest}
    made["additionalProperties"] = False


def _pattern_of_names(rules: dict[str, Any], place: LocatedSchema) -> str:
    try:
        match rules:
            case {"pattern": str(pattern)}:
                return translate_pattern(pattern)
            case {"format": name} if name in _NAMES_BY_FORMAT:
                return _NAMES_BY_FORMAT[name]
            case {"pattern": _} | {"format": _}:
                _refuse_names(place)
    except PatternError as error:
        raise SchemaError(f"{_at(place, 'propertyNames')}: {error}") from None
    held: dict[str, Any] = {}
    for keyword, value in rules.items():
        _add_count(held, keyword, value, place)
    return f"^[\\s\\S]{{{held.get('minLength', 0)},{held.get('maxLength', '')}}}$"


def _check_free_names(made: dict[str, Any], place: LocatedSchema) -> None:
    """Refuse a `minProperties` that an output could reach by repeating a property that is not in `required`."""
    free = made.get("minProperties", 0) - len(set(made.get("required", ())))
    closed = made.get("additionalProperties") is False and "patternProperties" not in made
    if free > 1 and not closed:
        raise SchemaError(
            f"{_at(place, 'minProperties')} asks for {free} properties that are not in `required`, limit 1. Remedy: "
            "list them in `required`, or ask for fewer"
        )


_UNSERVED = {
    "uniqueItems": "leave it out and check the answer, or set maxItems to 1",
    "not": "leave it out, or describe what is allowed",
    "if": "use anyOf with one option for each case",
    "then": "use anyOf with one option for each case",
    "else": "use anyOf with one option for each case",
    "contains": "leave it out, or use prefixItems",
    "dependentRequired": "use anyOf with one option for each case",
    "dependentSchemas": "use anyOf with one option for each case",
    "dependencies": "use anyOf with one option for each case",
    "unevaluatedProperties": "use additionalProperties in each option",
    "unevaluatedItems": "use items in each option",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
_RULES_OF_NAMES = frozenset(["enum", "const", "pattern", "minLength", "maxLength", "format"])


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _add_count(made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema) -> None:
    """Add a count of characters, items or properties; a maximum that no output reaches is dropped."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if not _is_count(value):
        raise SchemaError(f"{_at(place, keyword)} is not a non-negative integer. Remedy: send one")
    if value < COUNT_MAX:
        made[keyword] = value
    elif keyword.startswith("min"):
        message, remedy = f"{_at(place, keyword)} is too large", "use a smaller number"
        raise SchemaError(
            limit_message(message, value=shown(value), limit=COUNT_MAX, remedy=remedy)
        )


def _add_type(made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(each, str) and each in TYPES for each in names):
        known = ", ".join(TYPES)
        raise SchemaError(
            f"{_at(place, keyword)} is not one of {known}, or a list of them. Remedy: correct it"
        )
    made[keyword] = value


def _add_values(made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema) -> None:
    if keyword == "enum":
        _check_list(value, keyword, place)
    made[keyword] = _constant(value, _step(place.pointer, keyword), keyword)


def _add_format(made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema) -> None:
    # With a pattern, a format is an annotation: zod's patterns of dates and times disagree with RFC 3339.
    if isinstance(value, str) and value in FORMATS and "pattern" not in place.schema:
        made[keyword] = value


def _add_required(made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema) -> None:
    _check_list(value, keyword, place, empty=True)
    if not all(isinstance(each, str) for each in value):
        raise SchemaError(
            f"{_at(place, keyword)} has an item that is not a string. Remedy: send names"
        )
    made[keyword] = value


def _add_pattern(made: dict[str, Any], keyword: str, value: Any, place: LocatedSchema) -> None:
    if not isinstance(value, str):
        raise SchemaError(
            f"{_at(place, keyword)} is not a string. Remedy: send a regular expression"
        )
    first, *others = (translate_pattern(each) for each in split_lookaheads(value))
    made["pattern"] = first
    if others:
        made.setdefault("allOf", []).extend({"pattern": each} for each in others)


def _check_list(value: Any, keyword: str, place: LocatedSchema, *, empty: bool = False) -> None:
    if not isinstance(value, list) or not (value or empty):
        wanted = "a list" if empty else "a non-empty list"
        raise SchemaError(f"{_at(place, keyword)} is not {wanted}. Remedy: send one")


def _is_integer(node: dict[str, Any]) -> bool:
    """Return True if the only numbers that a schema allows are integers."""
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return "integer" in kinds and "number" not in kinds


def _add_options(made: dict[str, Any], options: list[Schema]) -> None:
    """Add `anyOf`; if the schema has one already, in an `allOf`."""
    if "anyOf" in made:
        made.setdefault("allOf", []).append({"anyOf": options})
    else:
        made["anyOf"] = options


def _together(made: dict[str, Any], first: str, second: str) -> dict[str, Any]:
    """Return a schema with keyword `second` right after `first`: the library combines only adjacent keywords."""
    found = {}
    for keyword, value in made.items():
        if keyword != second:
            found[keyword] = value
        if keyword == first:
            found[second] = made[second]
    return found


def _constant(value: Any, pointer: str, keyword: str) -> Any:
    """Return a value of `const` or `enum` with its numbers in a form that the library represents exactly."""
    if isinstance(value, dict):
        return {
            name: _constant(each, _step(pointer, name), keyword) for name, each in value.items()
        }
    if isinstance(value, list):
        return [_constant(each, _step(pointer, str(at)), keyword) for at, each in enumerate(value)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return constant(value)
        except NumberError as error:
            raise SchemaError(f"`{keyword}` at {pointer}: {error}") from None
    return value


_PLAIN: dict[str, Callable[[dict[str, Any], str, Any, LocatedSchema], None]] = {
    "type": _add_type,
    "const": _add_values,
    "enum": _add_values,
    "required": _add_required,
    "pattern": _add_pattern,
    "format": _add_format,
    **dict.fromkeys(_COUNTS, _add_count),
}
"""Keywords without subschemas."""
_ASSERTIONS = frozenset([*_PLAIN, *_SchemaRewriter._INNER, *_UNSERVED]) - {"type"}  # noqa: SLF001
