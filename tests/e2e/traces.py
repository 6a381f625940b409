"""What an engine could leave behind on the machine."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = ("vsched", "psm_", "torch_", "sem.")
"""What our code, multiprocessing and torch would call it; other programs may come and go beside the test."""


@dataclass(frozen=True)
class Traces:
    """Child processes, shared memory, open arenas and temporary files, at one moment."""

    children: frozenset[int]
    shared_memory: frozenset[str]
    arenas: int
    files: frozenset[str]


def traces(temporary: Path) -> Traces:
    """Return what there is now; the files are those below `temporary`."""
    gc.collect()  # a caught exception holds on to its frames, and they to what was stopped
    return Traces(
        children=frozenset(pid for pid in running() if parent(pid) == os.getpid()),
        shared_memory=frozenset(
            path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(SHARED_MEMORY)
        ),
        arenas=sum("vsched-arena" in link for link in open_files()),
        files=frozenset(str(path) for path in temporary.rglob("*")),
    )


def running() -> list[int]:
    """Return the ids of all processes, zombies included."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def parent(pid: int) -> int:
    """Return the parent of a process, 0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def open_files() -> list[str]:
    """Return where the open descriptors of this process lead."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(path.readlink()))
        except OSError:
            continue  # it was the descriptor of the listing itself
    return links
