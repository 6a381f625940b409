"""The environment variables of ranks, which the C library and OpenMP read when they are loaded."""

from __future__ import annotations

import os

SPIN_COUNT = 1_000
"""Turns that a thread of OpenMP spins before it sleeps, some 20 microseconds.

Only torch's own operations run on these threads. The kernels have a pool of their own, and threads of OpenMP that spin
longer would take its cores (docs/performance.md, "Threads").
"""

RANK_ENVIRONMENT = {
    # Without a number of turns of its own, a thread that waits sleeps at once.
    "OMP_WAIT_POLICY": "PASSIVE",
    # The C library keeps what a step frees for the next one, up to its own bound of 32 MiB a piece: fetching the same
    # pages from the system again in every step costs as much as the attention of a long prompt.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    # Each further arena would scatter what is free.
    "MALLOC_ARENA_MAX": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def rank_environment(threads: int) -> dict[str, str]:
    """Return the environment of a rank that computes with `threads` threads.

    A `GOMP_SPINCOUNT` in the environment of the engine is kept.
    """
    own = {**RANK_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT), **os.environ, **own}
