"""The same seed is the same run, in any process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCENARIOS = 12


def digests(hash_seed: str) -> list[str]:
    """Run in a process; return the digests of its scenarios, and its hash of a string."""
    path = os.pathsep.join(str(ROOT / part) for part in ("", "policies", "workers"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.digests", str(SCENARIOS)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return done.stdout.split()


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep two processes for each core at work."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_run_is_the_same_under_any_hash_seed_and_load() -> None:
    """A digest covers all events and decisions of the kernel, with their times."""
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(digests, ("1", "2"))
    with busy_cores():
        third = digests("3")
    assert len({first[-1], second[-1], third[-1]}) == 3, "the processes do hash differently"
    assert first[:-1] == second[:-1] == third[:-1]
    assert len(set(first[:-1])) == SCENARIOS
