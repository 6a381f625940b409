"""A real limit on the memory of a process, and its errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.programs import printed_by
from vsched.errors import DeviceOutOfMemory
from vsched.worker import memory
from vsched.worker.memory import (
    host_available,
    host_total,
    limit_process_memory,
    memory_errors,
    process_limit,
    reports_free_memory,
)

GIB = 1 << 30


@pytest.mark.slow
def test_limit_process_memory_is_real_and_final() -> None:
    """Beyond it an allocation fails, and nothing in the process can raise it; one that is exceeded is refused."""
    script = """
import resource
from vsched.errors import DeviceOutOfMemory
from vsched.worker.memory import limit_process_memory, process_limit
try:
    limit_process_memory(1 << 20, keys="encode.memory_limit")
except DeviceOutOfMemory as error:
    print(error)
limit_process_memory(400 << 20, keys="encode.memory_limit")
assert process_limit() == 400 << 20
assert resource.getrlimit(resource.RLIMIT_DATA) == (400 << 20, 400 << 20)
import numpy as np
try:
    np.empty(400 << 20, np.uint8)
except MemoryError:
    print("failed for real")
"""
    refused, failed = printed_by(script).splitlines()
    assert refused.startswith("encode.memory_limit: ")
    assert refused.endswith("limit 1048576. Remedy: raise encode.memory_limit.")
    assert failed == "failed for real"


def test_limit_process_memory_of_zero_is_none() -> None:
    before = process_limit()
    limit_process_memory(0, keys="encode.memory_limit")
    assert process_limit() == before


@pytest.mark.slow
def test_mapped_weights_are_allowed_while_they_are_loaded() -> None:
    """The C library cannot allocate the size of the weight files before and afterwards."""
    script = """
import mmap
from vsched.worker.memory import limit_process_memory, mapped_weights, process_limit, status_bytes
held = status_bytes("VmData")
limit_process_memory(held + (64 << 20), keys="", mapped_bytes=256 << 20)
def fits():
    try:
        mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True
with mapped_weights():
    inside = fits()
print(fits(), inside, process_limit() - held)
"""
    assert printed_by(script).split() == ["False", "True", str(64 << 20)]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        SystemError("error return without exception set"),
        ImportError("libtorch.so: failed to map segment from shared object"),
        ImportError("libgomp.so.1: cannot allocate memory in static TLS block"),
        ImportError("libtorch_python.so: cannot map zero-fill pages"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), "site-packages/torch"),
    ],
)
def test_memory_errors_become_the_one_type(error: Exception) -> None:
    """Seen in practice while loading under tight limits."""
    with (
        pytest.raises(DeviceOutOfMemory, match=r"while loading\. Remedy: raise it\.$"),
        memory_errors("loading", remedy="raise it"),
    ):
        raise error


@pytest.mark.parametrize("error", [ImportError("no torch"), SystemError("bad"), OSError("bad")])
def test_memory_errors_let_others_pass(error: Exception) -> None:
    with pytest.raises(type(error)), memory_errors("loading", remedy="raise it"):
        raise error


def test_spare_memory_is_there_again_when_an_error_is_reported() -> None:
    """The body takes all memory within the limit, a page at a time, and keeps it."""
    script = """
import mmap
from vsched.worker.memory import SPARE_BYTES, limit_process_memory, spare_memory, status_bytes
limit_process_memory(status_bytes("VmData") + 4 * SPARE_BYTES, keys="")
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
taken = []
try:
    with spare_memory():
        while True:
            taken.append(mmap.mmap(-1, SPARE_BYTES // 8, flags=private))
except OSError:
    mmap.mmap(-1, SPARE_BYTES * 3 // 4, flags=private)
    print(len(taken) > 8)
"""
    assert printed_by(script).strip() == "True"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of 8 GiB with 6 free, and an empty folder in place of that of control groups."""
    host = tmp_path / "meminfo"
    host.write_text(f"MemTotal: {8 << 20} kB\nMemAvailable: {6 << 20} kB\n")
    monkeypatch.setattr(memory, "_HOST_MEMORY", host)
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def limit_group(
    folder: Path, limit: str, used: int, droppable: int = 0, *, older: bool = False
) -> None:
    """Write the files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if older else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if older else "memory.current")).write_text(f"{used}\n")
    total = "total_" * older
    (folder / "memory.stat").write_text(f"anon {used}\n{total}inactive_file {droppable}\n")


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    ("own", "above", "total", "free"),
    [
        (("max", 1), ("max", 1), 8 * GIB, 6 * GIB),
        ((str(4 * GIB), GIB), ("max", GIB), 4 * GIB, 3 * GIB),
        ((str(4 * GIB), GIB, GIB // 2), ("max", GIB), 4 * GIB, 3 * GIB + GIB // 2),
        (("max", GIB), (str(3 * GIB), 2 * GIB), 3 * GIB, GIB),
        ((str(4 * GIB), GIB), (str(5 * GIB), 4 * GIB), 4 * GIB, GIB),
        ((str(2 * GIB), 3 * GIB), ("max", GIB), 2 * GIB, 0),
        ((str(64 * GIB), 3 * GIB), ("max", GIB), 8 * GIB, 6 * GIB),
    ],
)
def test_host_memory_is_the_least_of_the_host_and_all_groups(
    groups: Path, older: bool, own: tuple[str, int], above: tuple[str, int], total: int, free: int
) -> None:
    """A service may have no limit of its own, but a slice around it that has one."""
    base = groups / "memory" if older else groups
    (groups.parent / "own").write_text("4:memory:/slice/own\n" if older else "0::/slice/own\n")
    limit_group(base / "slice" / "own", *own, older=older)
    limit_group(base / "slice", *above, older=older)
    assert (host_total(), host_available()) == (total, free)


def test_host_memory_of_a_container_is_that_of_the_group_at_the_base(groups: Path) -> None:
    """The path of its group may be that outside of the container, which does not exist inside."""
    (groups.parent / "own").write_text("1:cpu:/\n0::/docker/abc\n")
    limit_group(groups, str(2 * GIB), GIB)
    assert (host_total(), host_available()) == (2 * GIB, GIB)


def test_free_memory_is_unknown_without_a_view_of_control_groups(groups: Path) -> None:
    """A hidden limit may be lower than the memory of the host."""
    assert not reports_free_memory()
    (groups / "cgroup.controllers").touch()
    assert reports_free_memory()
    (groups.parent / "meminfo").write_text("MemTotal: 8 kB\n")
    assert not reports_free_memory()
