"""The model ranks detect a broken kernel: each oracle fails when its own property is broken."""

from __future__ import annotations

import random

import pytest

from tests.sim.planted import Plant, planted
from tests.unit.kernel.policy_pool import random_policies
from vsched.testing import run_random

REQUEST = "vsched.kernel.request:RequestState."
MOVES = "vsched.kernel.request_moves:RequestMoves."
IDLE = "vsched.kernel.encode.embedding_cache:EmbeddingEntry.is_idle"
ROOT = "root_hash(request.cache_salt, request.adapter)"
BREAKS = (
    Plant("hash without items", REQUEST + "extend_hashes", "self.request.items", "()", seed=259),
    Plant("hash without salt", MOVES + "_root", ROOT, 'root_hash("", request.adapter)', seed=158),
    Plant("hash without adapter", MOVES + "_root", ROOT, "root_hash(request.cache_salt)", seed=17),
    Plant(
        "leaked blocks",
        "vsched.kernel.generate.blocks:BlockPool.release",
        "in reversed(blocks):",
        "in reversed(blocks[:-1]):",
    ),
    Plant(
        "early chunks",
        "vsched.kernel.generate.group:GenerateGroup._chunk_stop",
        "return whole",
        "return whole + 1",
    ),
    Plant("lost claims", MOVES + "drop_claims", "self._cache.release(state, index)", "pass"),
    Plant(
        "cached prompts",
        REQUEST + "wants_prompt_logprobs",
        "return ",
        "return False and ",
        seed=158,
    ),
    Plant("deaf answers", MOVES + "_release_prompt", "if state.phase is PROMPT:", "if False:"),
    Plant(
        "sleepy queue",
        "vsched.kernel.scheduler:Scheduler._break_stall",
        "if not self._at_rest() or",
        "if True or",
        seed=85,
    ),
    Plant("pins that do not hold", IDLE, " and not self.pins", "", seed=8),
)


def run_many(first: int) -> None:
    """Run the seed that finds the broken property at present, and then the others."""
    for seed in (*range(first, 300), *range(first)):
        rng = random.Random(seed)
        run_random(rng, random_policies(rng))


@pytest.mark.parametrize("plant", BREAKS, ids=lambda plant: plant.name)
def test_cluster_notices_a_broken_kernel(plant: Plant) -> None:
    with planted(plant), pytest.raises((AssertionError, KeyError)):
        run_many(plant.seed)
