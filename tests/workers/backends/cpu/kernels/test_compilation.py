"""One source for one thread and for all, and the key of the cache on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

import numba
import numpy as np

from vsched_workers.backends.cpu.kernels import compilation
from vsched_workers.backends.cpu.kernels.compilation import content_key, threaded


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


def test_cache_is_keyed_by_every_file_of_the_folder(tmp_path: Path) -> None:
    """Numba itself compiles anew only when the function's own file has changed."""
    for name in ("gemm.py", "simd.py"):
        (tmp_path / name).write_text("pass")
    before = content_key(tmp_path)
    assert content_key(tmp_path) == before
    (tmp_path / "simd.py").write_text("pass  # changed")
    assert content_key(tmp_path) != before


def test_kernels_lie_in_the_folder_that_keys_the_cache() -> None:
    """A kernel of another folder would be stale after a change of what is compiled into it."""
    backend = Path(compilation.__file__).parent.parent
    outside = [file.name for file in backend.glob("*.py") if "@compiled" in file.read_text()]
    assert outside == []
