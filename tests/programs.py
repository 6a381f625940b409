"""Programs in separate processes: their imports, allocations and compiled kernels are not shared."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.patience import PATIENCE_S
from vsched.fork_server import rank_environment


def printed_by(
    program: str,
    *arguments: object,
    as_rank: bool = False,
    limit_s: float = 2 * PATIENCE_S,
    **more: str,
) -> str:
    """Run a program and return its output; `as_rank` gives it the environment of a rank with one thread.

    Raises:
        AssertionError: When it fails, with its errors.
    """
    environment = rank_environment(1) if as_rank else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout
