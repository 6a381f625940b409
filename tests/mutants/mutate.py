"""Mutants of a function: one change each, as whoever makes a slip would make it, in the running process."""

from __future__ import annotations
import __future__

import ast
import copy
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
REMOVABLE = (
    ast.Expr,
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.Delete,
    ast.Continue,
    ast.Break,
)


class Mutant(NamedTuple):
    """A change: where, what the line says, and what it says then."""

    place: str
    line: int
    before: str
    after: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.place} line {self.line}: `{self.before}` -> `{self.after}`"


def function_at(place: str) -> FunctionType:
    """Return the function of a place (`module:Class.method`)."""
    path, _, name = place.partition(":")
    found: Any = importlib.import_module(path)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    assert isinstance(found, FunctionType), place
    return found


def mutants_of(place: str) -> list[Mutant]:
    """Return all mutants of a function, in the order of its lines."""
    function = function_at(place)
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    found: list[Mutant] = []
    for index, node in enumerate(ast.walk(tree)):
        for change in _changes(node):
            changed = copy.deepcopy(tree)
            twin = list(ast.walk(changed))[index]
            after = change(twin, changed)
            if after is None:
                continue
            ast.fix_missing_locations(changed)
            line = first + getattr(node, "lineno", 1) - 1
            found.append(Mutant(place, line, ast.unparse(node), after, changed))
    return sorted(found, key=lambda one: one.line)


Change = Callable[[Any, ast.Module], str | None]


def _changes(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, REMOVABLE) and not _is_silent(node):
        yield _remove
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield _negate
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        yield _compare_otherwise
    if isinstance(node, ast.BoolOp):
        yield from (lambda twin, _, at=at: _without(twin, at) for at in range(len(node.values)))
    if isinstance(node, ast.comprehension):
        yield from (lambda twin, _, at=at: _unfiltered(twin, at) for at in range(len(node.ifs)))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        yield _another_constant
    if isinstance(node, ast.Name) and node.id in ("min", "max", "sorted"):
        yield _another_order


def _is_silent(node: ast.AST) -> bool:
    """Return whether a statement does nothing: a docstring, or a probe."""
    if not isinstance(node, ast.Expr):
        return False
    value = node.value
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call) and getattr(value.func, "id", "") == "probe"
    )


def _remove(twin: ast.stmt, tree: ast.Module) -> str:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and twin in block:
                block[block.index(twin)] = ast.copy_location(ast.Pass(), twin)
    return "pass"


def _negate(twin: Any, _: ast.Module) -> str | None:
    if isinstance(twin, ast.If) and all(_is_silent(one) for one in twin.body):
        return None
    twin.test = ast.UnaryOp(ast.Not(), twin.test)
    return ast.unparse(twin.test)


def _compare_otherwise(twin: ast.Compare, _: ast.Module) -> str:
    twin.ops[0] = OTHER[type(twin.ops[0])]()
    return ast.unparse(twin)


def _without(twin: ast.BoolOp, at: int) -> str:
    twin.values[at] = ast.Constant(isinstance(twin.op, ast.And))
    return ast.unparse(twin)


def _unfiltered(twin: ast.comprehension, at: int) -> str:
    del twin.ifs[at]
    return "without its condition"


def _another_constant(twin: ast.Constant, _: ast.Module) -> str:
    assert isinstance(twin.value, int)
    twin.value = (not twin.value) if isinstance(twin.value, bool) else twin.value + 1
    return repr(twin.value)


def _another_order(twin: ast.Name, _: ast.Module) -> str:
    twin.id = {"min": "max", "max": "min", "sorted": "list"}[twin.id]
    return twin.id


@contextmanager
def alive(mutant: Mutant) -> Iterator[None]:
    """Have a mutant in place of its function meanwhile."""
    function = function_at(mutant.place)
    scope: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    code = compile(mutant.tree, f"<{mutant.place}>", "exec", flags=flags)
    exec(code, function.__globals__, scope)
    before, function.__code__ = function.__code__, scope[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before
