"""The same seed is the same run, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCENARIOS = 10


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


@pytest.mark.slow
def test_run_is_the_same_under_any_hash_seed() -> None:
    """Of every layer: loop, threads, network, fast simulation, and all events of engines with their times."""
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(digests, ("1", "2"))
    assert first[-1] != second[-1], "the processes do hash differently"
    assert first[:-1] == second[:-1]
    assert len(set(first[:-1])) == len(first) - 1
