"""The kernel under any policies, sizes, faults and order of events: nothing is lost, wrong, or stuck.

`VSCHED_SEEDS=100000 pytest tests/unit/kernel/test_random_schedules.py` runs more seeds than usual.
"""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from tests.sim.planted import Plant, planted
from tests.unit.kernel.policy_pool import random_policies
from tests.unit.kernel.setups import assert_served, make_cluster, words
from tests.workers.properties import thorough
from vsched.testing import make_request, random_limits, run_random
from vsched_policies.eviction import KeepNothing

SEEDS = int(os.environ.get("VSCHED_SEEDS", "100"))
BATCH = 50


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, *thorough(*range(BATCH, SEEDS, BATCH))])
def test_kernel_survives_random_policies(start: int) -> None:
    """Whatever is legal to configure: every request is served or refused, and then nothing is held."""
    ended = refused = 0
    for seed in range(start, min(start + BATCH, SEEDS)):
        rng = random.Random(seed)
        policies = random_policies(rng) if seed % 8 else None
        try:
            cluster = run_random(rng, policies)
            assert policies or not cluster.kernel.statistics()["policy_faults"]
        except BaseException as error:
            error.add_note(f"seed {seed} with {policies}")
            raise
        ended += len(cluster.ended)
        refused += len(cluster.refused)
    assert ended > refused > 0, "the runs are about serving, and refuse some"


def test_kernel_keeps_an_embedding_that_the_first_chunk_reads() -> None:
    """The cached prefix ends between two occurrences of one image that is not retained."""
    cluster = make_cluster(slots=1, chunk_tokens=8, block_size=4, encode_eviction=KeepNothing())
    image = b"image"
    cluster.submit(make_request("once", words(2), [(0, 12, image)]))
    cluster.submit(make_request("twice", words(9), [(0, 12, image), (0, 12, image)]))
    assert_served(cluster, "once", "twice")
    assert cluster.ended["twice"].times.cached_tokens == 12
    assert cluster.encoded == [[image]]
    cluster.check_settled()


@pytest.mark.parametrize("seed", range(3))
def test_scheduler_serves_text_without_encoders(seed: int) -> None:
    """Requests with images are refused; the others are served, and lost groups do not end them all."""
    rng = random.Random(seed)
    sizes = {"encoders": 0, "pages": 0, "generators": 2, "encode_pauses": False}
    limits = msgspec.structs.replace(random_limits(rng), **sizes)
    cluster = run_random(rng, limits=limits, events=120)
    assert cluster.requests.keys() == cluster.ended.keys() | cluster.refused.keys()
    with_images = {name for name, request in cluster.requests.items() if request.items}
    assert with_images <= cluster.refused.keys()


# --- each check of the model ranks fails when its own property is broken ---


REQUEST = "vsched.kernel.request:RequestState."
MOVES = "vsched.kernel.request_moves:RequestMoves."
IDLE = "vsched.kernel.encode.embedding_cache:EmbeddingEntry.is_idle"
ROOT = "root_hash(request.cache_salt, request.adapter)"
BREAKS = (
    Plant("hash without items", REQUEST + "extend_hashes", "self.items", "()", seed=259),
    Plant("hash without salt", MOVES + "_root", ROOT, 'root_hash("", request.adapter)', seed=158),
    Plant("hash without adapter", MOVES + "_root", ROOT, "root_hash(request.cache_salt)", seed=17),
    Plant(
        "leaked blocks",
        "vsched.kernel.generate.blocks:BlockPool.release_blocks",
        "in reversed(blocks):",
        "in reversed(blocks[:-1]):",
    ),
    Plant(
        "early chunks",
        "vsched.kernel.generate.group:GenerateGroup._chunk_stop",
        "return shortened",
        "return shortened + 1",
    ),
    Plant("lost claims", MOVES + "drop_claims", "self._cache.release_claim(state, index)", "pass"),
    Plant("cached", REQUEST + "wants_prompt_logprobs", "return ", "return False and ", seed=158),
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
