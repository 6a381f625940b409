"""Check that schemas are disjoint, so that `oneOf` equals `anyOf`; length of chains of references."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ALL = frozenset(["null", "boolean", "number", "string", "array", "object"])
_DEPTH_MAX = 16
_PAIRS_MAX = 20_000


@dataclasses.dataclass(slots=True)
class LocatedSchema:
    """A schema with its JSON pointer, and the base URI of its references."""

    schema: Any
    pointer: str
    base: str


class Disjointness:
    """Proves that schemas have no value in common."""

    def __init__(self, find: Callable[[Any, LocatedSchema], LocatedSchema]) -> None:
        """Take the function that resolves a reference in a place."""
        self._find = find
        self._work = 0

    def overlapping(self, places: Sequence[LocatedSchema]) -> tuple[int, int] | None:
        """Return the first two schemas that may match the same value; None if there are none."""
        flat = [self._parts(each, 0) for each in places]
        if _all_differ([_values(parts) for parts in flat]) or self._tagged(flat):
            return None
        for (at, first), (other, second) in itertools.combinations(enumerate(flat), 2):
            if not self._disjoint(first, second, 0):
                return at, other
        return None

    def _tagged(self, flat: list[list[LocatedSchema]]) -> bool:
        """Return True if all schemas are objects with a required property that has different values in each."""
        if any(_types(parts) != {"object"} for parts in flat):
            return False
        shared = set.intersection(*map(_required, flat))
        return any(
            _all_differ([_values(self._property(parts, name)) for parts in flat])
            for name in sorted(shared)[:_DEPTH_MAX]
        )

    def _parts(self, place: LocatedSchema, depth: int) -> list[LocatedSchema]:
        """Return the schema and the schemas in its `$ref` and `allOf`: a value must match all of them."""
        found, node = [place], place.schema
        self._work += 1
        if not isinstance(node, dict) or depth > _DEPTH_MAX or self._work > _PAIRS_MAX:
            return found
        if "$ref" in node:
            found += self._parts(self._find(node["$ref"], place), depth + 1)
        held = node.get("allOf")
        for each in held if isinstance(held, list) else ():
            found += self._parts(self._inner(place, each), depth + 1)
        return found

    def _inner(self, place: LocatedSchema, schema: Any) -> LocatedSchema:
        return LocatedSchema(schema, place.pointer, place.base)

    def _disjoint(
        self, first: list[LocatedSchema], second: list[LocatedSchema], depth: int
    ) -> bool:
        self._work += len(first) * len(second)
        if depth > _DEPTH_MAX or self._work > _PAIRS_MAX:
            return False
        if any(each.schema is False for each in (*first, *second)):
            return True
        if not _types(first) & _types(second):
            return True
        values, others = _values(first), _values(second)
        if values is not None and others is not None and not values & others:
            return True
        for parts, rest in ((first, second), (second, first)):
            for options in self._options(parts):
                if all(
                    self._disjoint([*parts_of, *_without_options(parts)], rest, depth + 1)
                    for parts_of in options
                ):
                    return True
        if _types(first) & _types(second) != {"object"}:
            return False
        return any(
            self._disjoint(self._property(first, name), self._property(second, name), depth + 1)
            for name in sorted(_required(first) | _required(second))
        )

    def _options(self, parts: list[LocatedSchema]) -> list[list[list[LocatedSchema]]]:
        """Return the options of each `anyOf` and `oneOf` in the parts."""
        found = []
        for part in parts:
            for keyword in ("anyOf", "oneOf"):
                held = part.schema.get(keyword) if isinstance(part.schema, dict) else None
                if isinstance(held, list) and held:
                    found.append([self._parts(self._inner(part, each), 1) for each in held])
        return found

    def _property(self, parts: list[LocatedSchema], name: str) -> list[LocatedSchema]:
        """Return the schemas that the value of a property must match."""
        found: list[LocatedSchema] = []
        for part in parts:
            node = part.schema
            if not isinstance(node, dict):
                continue
            listed = node.get("properties")
            if isinstance(listed, dict) and name in listed:
                found += self._parts(self._inner(part, listed[name]), 0)
            elif "patternProperties" not in node and "additionalProperties" in node:
                found += self._parts(self._inner(part, node["additionalProperties"]), 0)
        return found


def _all_differ(values: list[set[str] | None]) -> bool:
    """Return True if all schemas list their values, and no value is in two lists."""
    known = [each for each in values if each is not None]
    return len(known) == len(values) and sum(map(len, known)) == len(set().union(*known))


def _without_options(parts: list[Any]) -> list[Any]:
    """Return the parts that have no `anyOf` or `oneOf`."""
    return [
        each
        for each in parts
        if not (isinstance(each.schema, dict) and {"anyOf", "oneOf"} & each.schema.keys())
    ]


def _types(parts: Sequence[LocatedSchema]) -> frozenset[str]:
    """Return the types that all these schemas allow; `integer` counts as `number`."""
    found = _ALL
    for part in parts:
        node = part.schema
        if not isinstance(node, dict):
            continue
        kinds = node.get("type")
        if kinds is not None:
            kinds = kinds if isinstance(kinds, list) else [kinds]
            found &= {
                "number" if each == "integer" else each for each in kinds if isinstance(each, str)
            }
        for values in _listed(node):
            found &= {_type(each) for each in values}
    return found


def _values(parts: Sequence[LocatedSchema]) -> set[str] | None:
    """Return the `const` and `enum` values that all these schemas allow, as JSON; None if none lists its values."""
    found: set[str] | None = None
    for part in parts:
        if isinstance(part.schema, dict):
            for values in _listed(part.schema):
                texts = {_text(each) for each in values}
                found = texts if found is None else found & texts
    return found


def _listed(node: dict[str, Any]) -> list[list[Any]]:
    found = [[node["const"]]] if "const" in node else []
    if isinstance(node.get("enum"), list):
        found.append(node["enum"])
    return found


def _required(parts: Sequence[LocatedSchema]) -> set[str]:
    found: set[str] = set()
    for part in parts:
        names = part.schema.get("required") if isinstance(part.schema, dict) else None
        found |= (
            {each for each in names if isinstance(each, str)} if isinstance(names, list) else set()
        )
    return found


def _type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def _text(value: Any) -> str:
    """Return JSON that is identical for equal values."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: _normal(each) for name, each in value.items()}
        case list():
            return [_normal(each) for each in value]
    return value


def longest_chain(
    depths: Mapping[str, int], references: Mapping[str, Mapping[str, int]]
) -> tuple[int, list[str]]:
    """Return an upper bound of the nesting depth through references, and some names on the longest chain.

    Args:
        depths: The nesting depth within each definition.
        references: For each definition, the definitions that it refers to, with the depth of each reference.

    A cycle of definitions counts as one chain through all of them.
    """
    best: dict[str, tuple[int, list[str]]] = {}
    for circle in _circles(references):
        within = set(circle)
        own = sum(depths[name] for name in circle) if len(circle) > 1 else depths[circle[0]]
        chain, names = own, circle
        for name in circle:
            before = own if len(circle) > 1 else 0
            for target, at in references[name].items():
                if target in within or target not in best:
                    continue
                deeper, inner = best[target]
                if (length := (before or at) + deeper) > chain:
                    chain, names = length, [*circle[:3], *inner[:3]]
        for name in circle:
            best[name] = (chain, names)
    return max(best.values(), default=(0, []), key=lambda each: each[0])


def _circles(references: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Return the strongly connected components in reverse topological order (Tarjan's algorithm)."""
    found: list[list[str]] = []
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_names: dict[str, None] = {}
    for root in references:
        if root in numbers:
            continue
        numbers[root] = lowest[root] = len(numbers)
        open_names[root] = None
        path = [(root, iter(references[root]))]
        while path:
            name, targets = path[-1]
            for target in targets:
                if target not in references:
                    continue
                if target not in numbers:
                    numbers[target] = lowest[target] = len(numbers)
                    open_names[target] = None
                    path.append((target, iter(references[target])))
                    break
                if target in open_names:
                    lowest[name] = min(lowest[name], numbers[target])
            else:
                path.pop()
                if path:
                    above = path[-1][0]
                    lowest[above] = min(lowest[above], lowest[name])
                if lowest[name] == numbers[name]:
                    circle: list[str] = []
                    while not circle or circle[-1] != name:
                        circle.append(open_names.popitem()[0])
                    found.append(circle)
    return found
