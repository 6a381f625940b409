"""Programs in separate processes: their imports, allocations and compiled kernels are not shared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from tests.patience import PATIENCE_S
from vsched.fork_server import rank_environment


def ended(
    *arguments: object,
    variables: Mapping[str, str] | None = None,
    as_rank: bool = False,
    limit_s: float = 2 * PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end; `as_rank` gives it the environment of a rank with one thread."""
    environment = rank_environment(1) if as_rank else os.environ
    modules = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**environment, "PYTHONPATH": modules, **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def printed_by(
    program: str,
    *arguments: object,
    as_rank: bool = False,
    limit_s: float = 2 * PATIENCE_S,
    **more: str,
) -> str:
    """Run a program and return its output.

    Raises:
        AssertionError: When it fails, with its errors.
    """
    command = ("-W", "ignore", "-c", program, *arguments)
    done = ended(*command, variables=more, as_rank=as_rank, limit_s=limit_s)
    assert not done.returncode, done.stderr
    return done.stdout
