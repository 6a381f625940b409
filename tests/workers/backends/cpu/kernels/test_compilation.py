"""One source for one thread and for all, and what keys the code that is kept on disk."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

import numba
import numpy as np

from vsched_workers.backends.cpu.compiling.ahead import KERNEL_FILES
from vsched_workers.backends.cpu.kernel_store import CONSTANTS
from vsched_workers.backends.cpu.kernels import compilation
from vsched_workers.backends.cpu.kernels.compilation import Threaded, threaded


def _double(values: Any) -> None:
    for index in numba.prange(len(values)):
        values[index] *= 2


@pytest.mark.slow
def test_threaded_compiles_one_source_twice() -> None:
    """The variants do the same, and the cache on disk, which goes by names, keeps them apart."""
    kernel = threaded(_double)
    for variant in kernel:
        values = np.arange(5)
        variant(values)
        assert values.tolist() == [0, 2, 4, 6, 8]
    assert kernel.serial.py_func.__code__ is kernel.parallel.py_func.__code__
    assert kernel.serial.py_func.__qualname__ != kernel.parallel.py_func.__qualname__


def test_needed_are_both_variants_only_where_there_are_threads() -> None:
    kernel = threaded(_double)
    assert list(kernel.needed(1)) == [kernel.serial]
    assert list(kernel.needed(2)) == [kernel.serial, kernel.parallel]


def test_kernels_lie_in_the_folder_that_keys_the_cache() -> None:
    """A kernel of another folder would be stale after a change of what is compiled into it."""
    backend = Path(compilation.__file__).parent.parent
    outside = [file.name for file in backend.glob("*.py") if "@compiled" in file.read_text()]
    assert outside == []


def test_files_of_kernels_elsewhere_key_what_was_compiled_ahead() -> None:
    """Else ranks would find it old, and compile by themselves."""
    backend = Path(compilation.__file__).parent.parent
    elsewhere = {
        file
        for file in backend.glob("*/*.py")
        if "@compiled" in file.read_text() and file.parent.name != "kernels"
    }
    assert elsewhere == {*KERNEL_FILES}


def test_kernels_take_constants_from_files_that_key_the_cache() -> None:
    """A constant is compiled in: if it changed elsewhere, old code would be taken for new."""
    kernels = Path(compilation.__file__).parent
    compiled = (file for file in kernels.parent.glob("*/*.py") if "@compiled" in file.read_text())
    files = {*kernels.glob("*.py"), *compiled}
    named = {
        node.module or ""
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    foreign = {name for name in named if name.startswith("vsched") and ".kernels" not in name}
    store = "vsched_workers.backends.cpu.kernel_store"
    assert {str(importlib.import_module(name).__file__) for name in foreign - {store}} == {
        *map(str, CONSTANTS)
    }


def _kernels() -> Iterator[tuple[str, Threaded]]:
    """Yield every kernel that is compiled for all threads."""
    package, folder = compilation.__package__, Path(compilation.__file__).parent
    assert package is not None
    files = [(package, file) for file in sorted(folder.glob("[a-z]*.py"))]
    files += [
        (f"{package.rpartition('.')[0]}.{file.parent.name}", file) for file in sorted(KERNEL_FILES)
    ]
    for place, file in files:
        module = importlib.import_module(f"{place}.{file.stem}")
        for name, value in vars(module).items():
            if isinstance(value, Threaded) and value.serial.py_func.__module__ == module.__name__:
                yield name, value


def _first_read_in_a_branch(function: Any) -> set[str]:
    """Return the attributes of arguments whose first read may be passed by."""
    tree: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    arguments = {each.arg for each in tree.args.args}
    found: dict[str, bool] = {}

    def visit(node: ast.AST, certain: bool) -> None:
        if isinstance(node, ast.Attribute) and any(
            isinstance(each, ast.Name) and each.id in arguments for each in ast.walk(node)
        ):
            found.setdefault(ast.unparse(node), certain)
        for field, value in ast.iter_fields(node):
            branch = field in {"body", "orelse", "handlers"} or isinstance(node, ast.BoolOp)
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    visit(each, certain and not branch)

    for statement in tree.body:
        visit(statement, certain=True)
    return {each for each, certain in found.items() if not certain}


def _counts_first_in_a_branch(flag: int, rows: Any, out: Any) -> None:
    if flag:
        for row in numba.prange(len(rows.slots)):
            out[row] += 1
    for row in numba.prange(len(rows.slots)):
        out[row] += 1


def test_kernels_read_attributes_first_where_they_are_always_read() -> None:
    """Elsewhere numba's parallel loops may get a length that was never computed: see `threaded`.

    The size of an item is known when a kernel is compiled.
    """
    kernels = [*_kernels()]
    some = {"decode", "attend_rows", "multiply", "softmax_tile", "attend_in_tiles"}
    assert some <= {name for name, _ in kernels}
    for name, kernel in kernels:
        found = _first_read_in_a_branch(kernel.serial.py_func)
        assert not {each for each in found if not each.endswith(".itemsize")}, name
    assert _first_read_in_a_branch(_counts_first_in_a_branch) == {"rows.slots"}
