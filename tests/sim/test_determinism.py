"""The same seed is the same run, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCENARIOS = 12


def digests(hash_seed: str) -> list[str]:
    """Return what a process printed: the digests of its scenarios, and its hash of a string."""
    path = os.pathsep.join(str(ROOT / part) for part in ("", "policies", "workers"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.digests", str(SCENARIOS)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_run_is_the_same_under_any_hash_seed() -> None:
    """A digest is over all that the kernel heard and decided, and when."""
    with ThreadPoolExecutor(2) as threads:
        first, second, third = threads.map(digests, ("1", "2", "3"))
    assert len({first[-1], second[-1], third[-1]}) == 3, "the processes do hash differently"
    assert first[:-1] == second[:-1] == third[:-1]
    assert len(set(first[:-1])) == SCENARIOS
