"""Mutants of a function: one likely mistake each, applied in the running process."""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
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
    ast.Return,
    ast.Raise,
)
Change = Callable[[Any, ast.Module], str]
REACHED = "__reached__"


class Mutant(NamedTuple):
    """A change of a function.

    Attributes:
        place: The function: `module:Class.method`.
        line: The line of the file on which the statement begins.
        before: The code before the change.
        after: The code after it.
        number: Distinguishes it from others of the function with the same code.
        make: Returns the function with the change.
    """

    place: str
    line: int
    before: str
    after: str
    number: int
    make: Callable[[], ast.Module]

    @property
    def key(self) -> str:
        """Its name, valid while its function stays the same."""
        return f"{self.place}: {self.before} -> {self.after} #{self.number}"


def function_at(place: str) -> FunctionType:
    """Return the function of a place."""
    path, _, name = place.partition(":")
    found: Any = importlib.import_module(path)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    assert isinstance(found, FunctionType), place
    return found


def file_of(place: str) -> str:
    """Return the file of a place, relative to the repository."""
    return place.partition(":")[0].replace(".", "/") + ".py"


def _parsed(place: str) -> tuple[ast.Module, int]:
    lines, first = inspect.getsourcelines(function_at(place))
    return ast.parse(textwrap.dedent("".join(lines))), first


def mutants_of(place: str) -> list[Mutant]:
    """Return all mutants of a function, in the order of its lines."""
    tree, first = _parsed(place)
    found: list[Mutant] = []
    seen: dict[tuple[str, str], int] = {}
    statement_lines, silent = _statement_lines(tree), _silent_nodes(tree)
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in silent:
            continue
        for change in _changes(node, tree):
            before = ast.unparse(node).partition("\n")[0]
            after = change(copy.deepcopy(node), tree)
            number = seen[before, after] = seen.get((before, after), 0) + 1
            line = first + statement_lines[id(node)] - 1
            make = partial(_changed, tree, index, change)
            found.append(Mutant(place, line, before, after, number, make))
    return sorted(found, key=lambda one: one.line)


def _changed(tree: ast.Module, index: int, change: Change) -> ast.Module:
    changed = copy.deepcopy(tree)
    change(list(ast.walk(changed))[index], changed)
    return ast.fix_missing_locations(changed)


def _statement_lines(tree: ast.Module) -> dict[int, int]:
    """Return the line on which the statement of each node begins."""
    lines: dict[int, int] = {}

    def visit(node: ast.AST, line: int) -> None:
        if isinstance(node, ast.stmt):
            line = node.lineno
        lines[id(node)] = line
        for child in ast.iter_child_nodes(node):
            visit(child, line)

    visit(tree, 1)
    return lines


def _silent_nodes(tree: ast.Module) -> set[int]:
    """Return the nodes without effect, with all nodes below them: also probes alone, and texts of failures."""
    silent: set[int] = set()
    for node in ast.walk(tree):
        if _is_silent(node) or (
            isinstance(node, ast.If) and all(map(_is_silent, node.body)) and not node.orelse
        ):
            silent.update(map(id, ast.walk(node)))
        elif isinstance(node, ast.Assert) and node.msg is not None:
            silent.update(map(id, ast.walk(node.msg)))
    return silent


def _changes(node: ast.AST, tree: ast.Module) -> Iterator[Change]:
    if isinstance(node, REMOVABLE) and not _ends(node, tree):
        yield _remove
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield _negate
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        yield _compare_otherwise
    if isinstance(node, ast.BoolOp):
        yield from (lambda twin, _, at=at: _without(twin, at) for at in range(len(node.values)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _without_not
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield _other_sign
    if isinstance(node, ast.comprehension):
        yield from (lambda twin, _, at=at: _unfiltered(twin, at) for at in range(len(node.ifs)))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        yield _another_constant
    if isinstance(node, ast.Name) and node.id in ("min", "max", "sorted"):
        yield _another_order


def _is_silent(node: ast.AST) -> bool:
    """Return True for a statement that does nothing: a docstring, a declaration, or a probe."""
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    if not isinstance(node, ast.Expr):
        return False
    value = node.value
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call) and getattr(value.func, "id", "") == "probe"
    )


def _ends(node: ast.AST, tree: ast.Module) -> bool:
    """Return True if this returns None at the end of its function."""
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    if not isinstance(node, ast.Return) or node is not function.body[-1]:
        return False
    return node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)


def _remove(twin: ast.stmt, tree: ast.Module) -> str:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and twin in block:
                block[block.index(twin)] = ast.copy_location(ast.Pass(), twin)
    return "pass"


def _negate(twin: Any, _: ast.Module) -> str:
    twin.test = ast.UnaryOp(ast.Not(), twin.test)
    return ast.unparse(twin).partition("\n")[0]


def _compare_otherwise(twin: ast.Compare, _: ast.Module) -> str:
    twin.ops[0] = OTHER[type(twin.ops[0])]()
    return ast.unparse(twin)


def _without(twin: ast.BoolOp, at: int) -> str:
    twin.values[at] = ast.Constant(isinstance(twin.op, ast.And))
    return ast.unparse(twin)


def _without_not(twin: ast.UnaryOp, _: ast.Module) -> str:
    twin.operand = ast.UnaryOp(ast.Not(), twin.operand)
    return ast.unparse(twin)


def _other_sign(twin: ast.BinOp, _: ast.Module) -> str:
    twin.op = ast.Sub() if isinstance(twin.op, ast.Add) else ast.Add()
    return ast.unparse(twin)


def _unfiltered(twin: ast.comprehension, at: int) -> str:
    del twin.ifs[at]
    return ast.unparse(twin).strip()


def _another_constant(twin: ast.Constant, _: ast.Module) -> str:
    assert isinstance(twin.value, int)
    twin.value = (not twin.value) if isinstance(twin.value, bool) else twin.value + 1
    return repr(twin.value)


def _another_order(twin: ast.Name, _: ast.Module) -> str:
    twin.id = {"min": "max", "max": "min", "sorted": "list"}[twin.id]
    return twin.id


def plant(mutant: Mutant) -> None:
    """Replace its function by a mutant, for the rest of this process."""
    _replace(mutant.place, mutant.make())


def watch(places: tuple[str, ...]) -> set[tuple[str, int]]:
    """Have functions record their executed statements, for the rest of this process; return the set of these."""
    reached: set[tuple[str, int]] = set()
    vars(builtins)[REACHED] = lambda place, line: reached.add((place, line))
    for place in places:
        tree, first = _parsed(place)
        for node in list(ast.walk(tree)):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list) and not isinstance(node, ast.Module):
                    block[:] = [
                        new for one in block for new in (_note(place, first + one.lineno - 1), one)
                    ]
        (function,) = tree.body
        assert isinstance(function, ast.FunctionDef)
        # The head of a function counts as reached by a call.
        function.body.insert(0, _note(place, first + function.lineno - 1))
        _replace(place, ast.fix_missing_locations(tree))
    return reached


def _note(place: str, line: int) -> ast.stmt:
    return ast.parse(f"{REACHED}({place!r}, {line})").body[0]


def _replace(place: str, tree: ast.Module) -> None:
    function = function_at(place)
    scope: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    code = compile(tree, f"<{place}>", "exec", flags=flags)
    exec(code, function.__globals__, scope)
    new = scope[function.__name__]
    function.__code__ = new.__code__
    function.__defaults__, function.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
