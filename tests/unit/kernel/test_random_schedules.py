"""The kernel under any policies, sizes, faults and order of events: nothing is lost, wrong, or stuck.

`VSCHED_SEEDS=100000 pytest tests/unit/kernel/test_random_schedules.py` runs more seeds than usual.
"""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from tests.unit.kernel.policy_pool import random_policies
from tests.unit.kernel.setups import assert_served, make_cluster, words
from tests.workers.properties import thorough
from vsched.testing import ModelCluster, make_request, random_limits, run_random
from vsched_policies.eviction import KeepNothing

SEEDS = int(os.environ.get("VSCHED_SEEDS", "100"))
BATCH = 50


def run_seed(seed: int) -> ModelCluster:
    rng = random.Random(seed)
    policies = random_policies(rng) if seed % 8 else None
    try:
        cluster = run_random(rng, policies)
        assert policies or not cluster.kernel.statistics()["policy_faults"]
    except BaseException as error:
        error.add_note(f"seed {seed} with {policies}")
        raise
    return cluster


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, *thorough(*range(BATCH, SEEDS, BATCH))])
def test_kernel_survives_random_policies(start: int) -> None:
    """Whatever is legal to configure: every request is served or refused, and then nothing is held."""
    ended = refused = 0
    for seed in range(start, min(start + BATCH, SEEDS)):
        cluster = run_seed(seed)
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
    limits = msgspec.structs.replace(
        random_limits(rng), encoders=0, pages=0, generators=2, encode_pauses=False
    )
    cluster = run_random(rng, limits=limits, events=120)
    assert cluster.requests.keys() == cluster.ended.keys() | cluster.refused.keys()
    with_images = {name for name, request in cluster.requests.items() if request.items}
    assert with_images <= cluster.refused.keys()
