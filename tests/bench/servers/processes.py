"""CPU time and memory of a server's processes, read from /proc, and busy loops next to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vsched.bench.machine import process_s
from vsched.worker.memory import status_bytes

PROC = Path("/proc")
_PARENT, _SESSION, _BEGAN = 1, 3, 19
"""Positions in /proc/PID/stat, after the name."""


def _fields(pid: int) -> list[str]:
    """Return the fields of a process after its name; empty if it is gone."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def family(root: int) -> list[int]:
    """Return a process, its descendants, and orphans in its session."""
    found = {int(entry.name): _fields(int(entry.name)) for entry in PROC.glob("[0-9]*")}
    members = {root}
    grew = True
    while grew:
        new = {
            pid
            for pid, fields in found.items()
            if fields and (int(fields[_PARENT]) in members or int(fields[_SESSION]) == root)
        }
        grew = not new <= members
        members |= new
    return sorted(pid for pid in members if found.get(pid))


def identities(pids: Sequence[int]) -> dict[int, str]:
    """Return the start time of each process, which distinguishes it from a later one with the same number."""
    return {pid: fields[_BEGAN] for pid in pids if (fields := _fields(pid))}


def kill_remaining(began: Mapping[int, str]) -> None:
    """Kill the processes of `identities` that still run."""
    for pid, identity in identities(list(began)).items():
        if began[pid] == identity:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def end(
    process: subprocess.Popen[bytes], patience_s: float, *, by: signal.Signals = signal.SIGTERM
) -> int:
    """End a process by a signal, or SIGKILL after some seconds, and its descendants; return its status."""
    began = identities(family(process.pid))
    process.send_signal(by)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    kill_remaining(began)
    return process.wait()


def cpu_s(pids: Sequence[int]) -> float:
    """Return the total CPU seconds of these processes."""
    total_s = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total_s += process_s(pid)
    return total_s


def memory_mib(pids: Sequence[int]) -> dict[str, float]:
    """Return the resident memory of each process, with shared pages divided among their users (PSS)."""
    result: dict[str, float] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            held = status_bytes("Pss", PROC / str(pid) / "smaps_rollup")
            name = (PROC / str(pid) / "comm").read_text().strip()
            result[f"{name} {pid}"] = round(held / (1 << 20), 1)
    return result


LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""
"""Ends with its parent process, even if that was killed."""


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[list[int]]:
    """Run busy loops of normal priority and always end them; yields their process ids."""
    command = [sys.executable, "-S", "-c", LOOP, str(os.getpid())]
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process.pid)
        yield started
