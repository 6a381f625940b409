"""Environment variables of ranks, which the C library and OpenMP read when they are loaded."""

from __future__ import annotations

import os

SPIN_COUNT = 1_000
"""Number of spins of an idle OpenMP thread before it sleeps, about 20 microseconds.

Only torch's own operations use these threads. The CPU kernels have their own pool, whose cores longer-spinning OpenMP
threads would take (docs/performance.md, "Threads").
"""

RANK_ENVIRONMENT = {
    # Without GOMP_SPINCOUNT, idle threads sleep at once.
    "OMP_WAIT_POLICY": "PASSIVE",
    # The C library keeps memory freed by a step for the next one, in blocks of up to 32 MiB, its maximum: page faults
    # for the same memory in every step would cost as much as the attention over a long prompt.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    # More malloc arenas would fragment the free memory.
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
