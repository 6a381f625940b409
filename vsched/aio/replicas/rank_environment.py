"""The environment variables of ranks, which the C library and OpenMP read when they are loaded."""

from __future__ import annotations

import os

SPIN_COUNT, SPIN_COUNT_OVERSUBSCRIBED = 50_000, 2_000
"""How many turns a thread looks before it sleeps while it waits for the others of its rank.

About a millisecond where each thread has a core: the next product comes sooner, and being woken for it takes longer.
Where ranks have more threads than there are cores, about as long as being woken takes: more would take the cores from a
rank that works (docs/performance.md, "Waiting").
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


def rank_environment(threads: int, *, oversubscribed: bool) -> dict[str, str]:
    """Return the environment of a rank that computes with `threads` threads.

    `oversubscribed`: all ranks together have more threads than there are cores. What the environment of the engine
    says of waiting goes first.
    """
    turns = SPIN_COUNT_OVERSUBSCRIBED if oversubscribed else SPIN_COUNT
    own = {**RANK_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    return {"GOMP_SPINCOUNT": str(turns), **os.environ, **own}
