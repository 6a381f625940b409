"""Neighbours of a measured server: processes that each keep a core busy."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

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
