"""Length of reference chains between definitions, which native parsers follow recursively on a bounded stack."""

from __future__ import annotations

from collections.abc import Mapping


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
