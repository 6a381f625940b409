"""Compiles kernels in child processes, on all cores, before a rank reads them from disk."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from vsched.worker.contract import Progress
from vsched.worker.memory import host_available
from vsched.worker.spec import usable_cores
from vsched_workers.backends.cpu.compiling.needs import Need
from vsched_workers.backends.cpu.kernel_store import content_key, kernel_folder, processor

CHILD_BYTES = 512 << 20
"""Memory of a compiling process: libraries and the compiler."""
LOCK_S = 600.0
"""Maximum wait for another process that compiles for this processor; then both compile."""
_POLL_S = 0.2
KERNEL_FILES = [
    Path(__file__).parents[1] / name
    for name in (
        *(
            "quantized/kernel.py",
            "quantized/integers.py",
            "tiles/kernel.py",
            "tiles/attention.py",
            "quantized/widened.py",
            "low_rank/kernel.py",
        ),
        "decode_step/kernel.py",
    )
]
"""Kernel sources that are not part of the folder's name."""


def compile_ahead(wanted: Sequence[Need], progress: Progress) -> int:
    """Compile the kernels that are not on disk; return their number.

    Does nothing if the folder is not writable; the rank then compiles them, as it does if a child fails.
    """
    folder = kernel_folder()
    if folder is None or not os.access(folder, os.W_OK) or not missing(wanted, folder):
        return 0
    try:
        lock = open(folder / "compiling", "w", encoding="ascii")  # noqa: SIM115 - closed below
    except OSError:
        return 0
    with lock:
        _wait_for(lock, progress)
        found = missing(wanted, folder)
        if found:
            _compile(found, folder, progress)
        return len(found)


def missing(wanted: Sequence[Need], folder: Path) -> list[Need]:
    """Return the kernels, without duplicates, that were never compiled into a folder for this processor."""
    return [each for each in dict.fromkeys(wanted) if not mark_of(each, folder).exists()]


def mark_of(need: Need, folder: Path) -> Path:
    """Return the marker file of a kernel that is in a folder, for this processor."""
    described = repr((tuple(need), processor(), content_key(KERNEL_FILES)))
    return folder / f"compiled-{hashlib.blake2b(described.encode(), digest_size=8).hexdigest()}"


def at_once(count: int) -> int:
    """Number of processes that compile at a time, limited by cores and memory."""
    return max(1, min(count, usable_cores(), host_available() // CHILD_BYTES))


def expected_s(wanted: Sequence[Need], processes: int) -> float:
    """Estimated duration: the maximum of the longest kernel and all of them divided among processes."""
    seconds = [each.seconds for each in wanted]
    return max(max(seconds), sum(seconds) / processes)


def _wait_for(lock: IO[str], progress: Progress) -> None:
    """Wait while another process compiles: it may compile the same kernels, and cores are shared."""
    deadline_s, reported = time.monotonic() + LOCK_S, False
    while time.monotonic() < deadline_s:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not reported:
            progress("waiting for another process that compiles kernels", 0.0)
            reported = True
        time.sleep(_POLL_S)


def _compile(wanted: Sequence[Need], folder: Path, progress: Progress) -> None:
    processes = at_once(len(wanted))
    what = (
        f"compiling {len(wanted)} kernels for this processor, once, about "
        f"{expected_s(wanted, processes):.0f} s"
    )
    progress(what, 0.0)
    command = [sys.executable, "-m", "vsched_workers.backends.cpu.compiling.children"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    total_s = sum(each.seconds for each in wanted)
    done_s = 0.0
    with subprocess.Popen(  # noqa: S603 - our own words
        [*command, str(processes)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as children:
        assert children.stdin is not None
        assert children.stdout is not None
        children.stdin.write(msgspec.json.encode(wanted))
        children.stdin.close()
        for line in children.stdout:
            need = wanted[int(line)]
            with suppress(OSError):
                mark_of(need, folder).touch()
            done_s += need.seconds
            progress(what, done_s / total_s)
