"""A real limit on the memory of a process, and what it makes of errors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from vsched.errors import DeviceOutOfMemory
from vsched.worker.memory import (
    host_available,
    host_total,
    limit_process_memory,
    memory_errors,
    process_limit,
    status_bytes,
)


def in_process(script: str) -> str:
    """Run a script in a process of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_limit_process_memory_is_real_and_final() -> None:
    """Beyond it an allocation fails, and nothing in the process can lift it."""
    script = """
import resource
from vsched.worker.memory import limit_process_memory, process_limit
limit_process_memory(400 << 20, keys="encode.memory_limit")
assert process_limit() == 400 << 20
assert resource.getrlimit(resource.RLIMIT_DATA) == (400 << 20, 400 << 20)
import numpy as np
try:
    np.empty(400 << 20, np.uint8)
except MemoryError:
    print("failed for real")
"""
    assert in_process(script) == "failed for real"


@pytest.mark.slow
def test_limit_process_memory_refuses_what_is_exceeded_already() -> None:
    script = """
from vsched.errors import DeviceOutOfMemory
from vsched.worker.memory import limit_process_memory
try:
    limit_process_memory(1 << 20, keys="encode.memory_limit")
except DeviceOutOfMemory as error:
    print(error)
"""
    said = in_process(script)
    assert said.startswith("encode.memory_limit: ")
    assert said.endswith("limit 1048576. Remedy: raise encode.memory_limit.")


def test_limit_process_memory_of_zero_is_none() -> None:
    before = process_limit()
    limit_process_memory(0, keys="encode.memory_limit")
    assert process_limit() == before


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


@pytest.mark.parametrize(
    "error", [ImportError("no torch"), SystemError("bad call"), OSError("bad")]
)
def test_memory_errors_let_others_pass(error: Exception) -> None:
    with pytest.raises(type(error)), memory_errors("loading", remedy="raise it"):
        raise error


def test_spare_memory_is_there_again_when_an_error_is_told() -> None:
    """The body takes all that the limit leaves, a page at a time, and keeps it."""
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
    assert in_process(script) == "True"


def test_host_memory_is_read_from_the_kernel() -> None:
    assert 0 < host_available() <= host_total()


def test_status_bytes_reads_kibibytes(tmp_path: Path) -> None:
    path = tmp_path / "status"
    path.write_text("VmData:\t     12 kB\nVmRSS:\t 3 kB\n")
    assert status_bytes("VmData", path) == 12 * 1024
    assert status_bytes("VmPeak", path) == 0
