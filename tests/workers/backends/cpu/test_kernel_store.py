"""Compiled kernels on disk: shared by all copies of the same sources, verified before use, failures are harmless."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

import numba

import vsched_workers
from vsched_workers.backends.cpu import kernel_store
from vsched_workers.backends.cpu.kernel_store import content_key, kernel_folder

SOURCES = Path(vsched_workers.__file__).parent
COUNTS = """
from numba.core import event
compiled = []
class Counts(event.Listener):
    def on_start(self, begun): pass
    def on_end(self, ended): compiled.append(ended)
event.register("numba:compile", Counts())
from vsched_workers.backends.cpu.kernels import sampling
sampling.warm_up_greedy()
print(len(compiled), sampling.__file__)
"""


def compiled_in(workers: Path, **environment: str) -> int:
    """Return the number of functions that a process compiles for `argmax`, given a folder of kernels."""
    path = os.pathsep.join([str(workers), *filter(None, sys.path)])
    reported = subprocess.run(
        [sys.executable, "-c", COUNTS],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert Path(reported[1]).is_relative_to(workers)
    return int(reported[0])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folder in place of the user's cache."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vsched"


@pytest.mark.slow
def test_kernels_of_a_copy_of_the_sources_are_not_compiled_again(
    cache: Path, tmp_path: Path
) -> None:
    """Another checkout, another environment, a wheel: only the content of the sources counts."""
    assert compiled_in(SOURCES.parent)
    copy = tmp_path / "copy"
    shutil.copytree(SOURCES, copy / SOURCES.name, ignore=shutil.ignore_patterns("__pycache__"))
    assert not compiled_in(copy)
    (folder,) = cache.iterdir()
    folder.chmod(0o500)
    assert not compiled_in(copy)
    folder.chmod(0o700)
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert compiled_in(copy)
    assert not compiled_in(copy)


@pytest.mark.slow
def test_kernels_are_compiled_where_they_cannot_be_kept(tmp_path: Path) -> None:
    """A full disk or a missing folder must not prevent serving."""
    folder = kernel_folder()
    assert folder is not None
    (tmp_path / folder.name).symlink_to("/proc")
    assert compiled_in(SOURCES.parent, NUMBA_CACHE_DIR=str(tmp_path))


def test_folder_is_keyed_by_every_file(tmp_path: Path) -> None:
    files = [tmp_path / "gemm.py", tmp_path / "simd.py"]
    for file in files:
        file.write_text("pass")
    before = content_key(files)
    assert content_key(files[::-1]) == before
    files[1].write_text("pass  # changed")
    assert content_key(files) != before


@pytest.mark.usefixtures("cache")
def test_a_file_that_was_moved_has_kernels_of_its_own() -> None:
    """Stored code contains the name of its module, and could not be loaded without that module."""

    def function() -> int:
        return 1

    kept = []
    for module in ("here", "there"):
        function.__module__ = module
        files: Any = kernel_store._KernelCache(function)._cache_file
        kept.append(files._name)
    assert kept[0] != kept[1]


def test_folder_is_the_users_own(cache: Path) -> None:
    folder = kernel_folder()
    assert folder is not None
    assert folder.parent == cache
    assert folder.stat().st_mode & 0o777 == 0o700


def test_unused_folders_are_deleted_when_a_new_one_is_made(cache: Path) -> None:
    old, recent = cache / "kernels-old", cache / "kernels-recent"
    for folder in (old, recent):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    assert kernel_folder()
    assert recent.exists()
    assert not old.exists()


def test_folder_lies_next_to_the_sources_if_the_user_has_none(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file")
    monkeypatch.setattr(kernel_store, "KERNELS", cache.parent)
    folder = kernel_folder()
    assert folder is not None
    assert folder.parent == cache.parent / "__pycache__"
