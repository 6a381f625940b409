"""Resources that an engine could leave behind on the machine."""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = ("vsched", "psm_", "torch_", "sem.")
"""Name prefixes of shared memory of vsched, multiprocessing and torch; other programs may create others meanwhile."""


@dataclass(frozen=True)
class Traces:
    """Child processes, abandoned shared memory, open arenas and temporary files, at one moment."""

    children: frozenset[int]
    shared_memory: frozenset[str]
    arenas: int
    files: frozenset[str]


def traces(temporary: Path) -> Traces:
    """Current traces; the files are those below `temporary`."""
    gc.collect()  # a caught exception keeps its frames alive, and with them stopped objects
    return Traces(
        children=frozenset(pid for pid in running() if parent(pid) == os.getpid()),
        shared_memory=abandoned_memory(),
        arenas=sum("vsched-arena" in link for link in open_files()),
        files=frozenset(str(path) for path in temporary.rglob("*")),
    )


def left_behind(temporary: Path, before: Traces) -> dict[str, object]:
    """Traces that did not exist before, by name."""
    now = traces(temporary)
    found = {
        "children": now.children - before.children,
        "shared memory": now.shared_memory - before.shared_memory,
        "arenas": now.arenas - before.arenas,
        "files": now.files - before.files,
    }
    return {name: each for name, each in found.items() if each}


def abandoned_memory() -> frozenset[str]:
    """Names of shared memory with one of our prefixes that no process maps.

    Mapped memory may belong to other tests that run at the same time.
    """
    shared = Path("/dev/shm")
    found = {}
    for path in shared.iterdir():
        if path.name.startswith(SHARED_MEMORY):
            with contextlib.suppress(FileNotFoundError):
                found[path.stat().st_ino] = path.name
    # By inode: mapped memory may have had another name by then.
    mapped = {int(line.split()[4]) for pid in running() for line in maps(pid).splitlines()}
    return frozenset(name for number, name in found.items() if number not in mapped)


def maps(pid: int) -> str:
    """Memory map of a process, empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def running() -> list[int]:
    """Ids of all processes, zombies included."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def parent(pid: int) -> int:
    """Parent of a process, 0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def open_files() -> list[str]:
    """Targets of this process's open descriptors."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(path.readlink()))
        except OSError:
            continue  # the descriptor of the listing itself
    return links
