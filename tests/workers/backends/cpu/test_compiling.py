"""Compiled kernels: in child processes before a model is loaded, and on disk, for all copies of the same sources.

Each needed one is compiled once and verified before use; failures are harmless.
"""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
from unittest.mock import Mock

import msgspec
import numba
import pytest
import torch

import vsched_workers
from tests.patience import PATIENCE_S
from tests.programs import printed_by
from tests.workers.driver import unreported
from tests.workers.properties import thorough
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cpu import compiling as compiling_module
from vsched_workers.backends.cpu import kernel_store
from vsched_workers.backends.cpu.backend import CpuBackend
from vsched_workers.backends.cpu.compiling import Need, compile_ahead, missing
from vsched_workers.backends.cpu.kernel_store import SOURCES as KEYED
from vsched_workers.backends.cpu.kernel_store import content_key, kernel_folder
from vsched_workers.backends.cpu.kernels import compilation, sampling
from vsched_workers.checkpoint.random_init import make_checkpoint

pytest.importorskip("numba")

GREEDY, NORM = ("greedy sampler",), ("norm",)
LEFT = """
import sys
from numba.core import event
class Tells(event.Listener):
    def on_start(self, begun): pass
    def on_end(self, ended):
        if ended.data["dispatcher"].py_func.__module__.startswith("vsched"):
            print(ended.data["dispatcher"].py_func.__qualname__, ended.data["args"])
import msgspec
from vsched.worker.contract import WorkerSettings
from vsched_workers.plugin import plugin
path, dtype, given = sys.argv[1:]
info = plugin.inspect(path, dtype=dtype, item_tokens_max=0)
settings = msgspec.json.decode(given, type=WorkerSettings)
for stage in ("encode", "generate"):
    plugin.compile_kernels(info, settings, lambda what, share: None, stage=stage)
event.register("numba:compile", Tells())
plugin.load_encoder(info, settings, lambda what, share: None)
worker = plugin.load_generator(info, settings, lambda what, share: None)
worker.build_kv(blocks=8, block_size=16)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compiling_module, "kernel_folder", lambda: tmp_path)
    return tmp_path


class Children:
    """Replaces the compiling processes: records the requested kernels, and compiles a given number of them."""

    def __init__(self, folder: Path, *, fails: int = -1) -> None:
        self.requested: list[list[Need]] = []
        self.stdin = self
        self.stdout: list[bytes] = []
        self._fails = fails

    def __call__(self, command: list[str], **_: object) -> Children:
        assert command[:3] == [sys.executable, "-m", compiling_module.__name__]
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, given: bytes) -> None:
        self.requested.append(msgspec.json.decode(given, type=list[Need]))
        self.stdout = [b"%d\n" % n for n in range(len(self.requested[-1])) if n != self._fails]

    def close(self) -> None:
        pass


@pytest.fixture
def compiling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Children]:
    def make(**given: Any) -> Children:
        made = Children(folder, **given)
        monkeypatch.setattr(subprocess, "Popen", made)
        return made

    return make


def test_each_kernel_is_compiled_once_and_its_progress_is_reported(
    folder: Path, compiling: Callable[..., Children]
) -> None:
    processes, reported = compiling(), []
    wanted = [GREEDY, NORM, GREEDY]
    assert compile_ahead(wanted, lambda what, share: reported.append((what, share))) == 2
    assert processes.requested == [[GREEDY, NORM]]
    assert [share for _, share in reported] == [0.0, 0.5, 1.0]
    assert reported[0][0].startswith("compiling 2 kernels for this processor, once, on ")
    assert compile_ahead(wanted, unreported) == 0
    assert compile_ahead([("low rank",)], unreported) == 1
    assert processes.requested[1:] == [[("low rank",)]]


def test_a_kernel_that_was_not_compiled_is_tried_again(
    folder: Path, compiling: Callable[..., Children]
) -> None:
    compiling(fails=0)
    compile_ahead([GREEDY, NORM], unreported)
    assert missing([GREEDY, NORM], folder) == [GREEDY]


def test_nothing_is_compiled_ahead_where_it_cannot_be_kept(
    folder: Path, compiling: Callable[..., Children], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = compiling()
    monkeypatch.setattr(compiling_module, "kernel_folder", lambda: None)
    assert compile_ahead([GREEDY], unreported) == 0
    monkeypatch.setattr(compiling_module, "kernel_folder", lambda: Path("/proc"))
    assert compile_ahead([GREEDY], unreported) == 0
    assert processes.requested == []


def test_models_of_all_paths_load_argmax_before_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss no measuring run loads it, and the first request of the generic path waited."""
    warm_up = Mock()
    monkeypatch.setattr(sampling, "warm_up_greedy", warm_up)
    CpuBackend(WorkerSettings(), torch.bfloat16).load_attention()
    warm_up.assert_called()


@pytest.mark.slow
@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize(
    ("size", "dtype", "given"),
    [
        ("nano25", "bfloat16", {"weights": "int4"}),
        *thorough(
            ("nano25", "bfloat16", {}),
            ("nano25", "float32", {"weights": "int4"}),
            ("nano3", "bfloat16", {"weights": "int8", "threads": 2, "adapters": 1}),
        ),
    ],
    ids=["int4", "bfloat16", "int4 in float32", "int8 and adapters"],
)
def test_ranks_find_all_that_they_need(
    size: str, dtype: str, given: dict[str, Any], tmp_path: Path
) -> None:
    """Real processes compile; afterwards nothing is missing."""
    make_checkpoint(str(tmp_path / size), size, dtype=dtype)
    settings = msgspec.json.encode(WorkerSettings(**given)).decode()
    path = tmp_path / size
    assert not printed_by(LEFT, path, dtype, settings, limit_s=5 * PATIENCE_S)


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


def compiled_in(workers: Path, **environment: Any) -> int:
    """Return the number of functions that a process compiles for `argmax`, given a folder of kernels."""
    path = os.pathsep.join([str(workers), *filter(None, sys.path)])
    reported = printed_by(COUNTS, PYTHONPATH=path, **environment).split()
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
    """Another checkout, another environment, a wheel: only the content of the sources counts.

    The folder may be read-only; damaged files are replaced.
    """
    assert compiled_in(SOURCES.parent)
    copy = tmp_path / "copy"
    shutil.copytree(SOURCES, copy / SOURCES.name, ignore=shutil.ignore_patterns("__pycache__"))
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


def test_a_file_that_was_moved_has_kernels_of_its_own(tmp_path: Path) -> None:
    """Stored code contains the name of its module, and could not be loaded without that module."""

    def function() -> int:
        return 1

    kept = []
    for module in ("here", "there"):
        function.__module__ = module
        kept.append(kernel_store._KernelCache(function, tmp_path)._prefix)
    assert kept[0] != kept[1]


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
    warnings: list[str] = []
    cache.parent.mkdir()
    cache.write_text("a file")
    monkeypatch.setattr(kernel_store, "KERNELS", cache.parent)
    folder = kernel_folder()
    assert folder is not None
    assert folder.parent == cache.parent / "__pycache__"
    monkeypatch.setattr(kernel_store, "KERNELS", cache)
    monkeypatch.setattr(kernel_store, "_warn_once", warnings.append)
    assert kernel_folder() is None
    assert warnings == [f"{cache}: Not a directory, {cache / '__pycache__'}: Not a directory"]


def test_kernels_and_their_constants_key_the_cache() -> None:
    """Constants are compiled in: if one changed elsewhere, stale code would be used."""
    backend = Path(compilation.__file__).parent.parent
    compiled = [file for file in backend.rglob("*.py") if "@compiled" in file.read_text()]
    named = {
        node.module or ""
        for file in compiled
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    own = {importlib.import_module(name).__file__ for name in named if name.startswith("vsched")}
    assert {*map(str, compiled), *own} <= {*map(str, KEYED)}
