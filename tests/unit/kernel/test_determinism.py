"""The same events give the same decisions, byte for byte, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


def run_in_process(hash_seed: str) -> tuple[str, str]:
    """Run in a process; return its output (digest and counts) and its hash of a string."""
    path = os.pathsep.join(str(ROOT / part) for part in ("", "policies", "workers"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernel.recorded_run", "5"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    said, _, string_hash = done.stdout.strip().rpartition(" ")
    return said, string_hash


@pytest.mark.slow
def test_scheduler_decides_the_same_under_any_hash_seed() -> None:
    """With faults, preemptions and evictions, two processes decide byte for byte alike."""
    first, first_hash = run_in_process("1")
    second, second_hash = run_in_process("2")
    assert first_hash != second_hash, "the two processes do hash differently"
    assert first == second
    assert "'Decide'" in first
    assert "'RestartGroup'" in first
