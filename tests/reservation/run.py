"""Starts a measurement of one budget as a rank is started."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from tests.reservation.measure import Found
from vsched.aio.fork_server import rank_environment


def run(
    checkpoint: str, *, tokens: int, batches: int, seed: int, blocks: int, timeout_s: float | None
) -> Found:
    """Measure in a process of its own.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: When it failed, or took too long.
    """
    words = [checkpoint, *(str(each) for each in (tokens, batches, seed, blocks))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.reservation.measure", *words],
        env=rank_environment(1),
        stdout=subprocess.PIPE,
        check=True,
        timeout=timeout_s,
    )
    return msgspec.json.decode(done.stdout, type=Found)
