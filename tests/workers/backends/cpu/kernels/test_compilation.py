"""Sources that key the kernel store."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

pytest.importorskip("numba")

from vsched_workers.backends.cpu.compiling import KERNEL_FILES
from vsched_workers.backends.cpu.kernel_store import CONSTANTS
from vsched_workers.backends.cpu.kernels import compilation


def test_kernels_lie_in_the_folder_that_keys_the_cache() -> None:
    """A kernel in another folder would be stale after a change of code compiled into it."""
    backend = Path(compilation.__file__).parent.parent
    outside = [file.name for file in backend.glob("*.py") if "@compiled" in file.read_text()]
    assert outside == []


def test_files_of_kernels_elsewhere_key_what_was_compiled_ahead() -> None:
    """Otherwise ranks would consider it stale and compile it themselves."""
    backend = Path(compilation.__file__).parent.parent
    elsewhere = {
        file
        for file in backend.glob("*/*.py")
        if "@compiled" in file.read_text() and file.parent.name != "kernels"
    }
    assert elsewhere == {*KERNEL_FILES}


def test_kernels_take_constants_from_files_that_key_the_cache() -> None:
    """Constants are compiled in: if one changed elsewhere, stale code would be used."""
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
