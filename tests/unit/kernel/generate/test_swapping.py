"""Preemption by swapping: KV blocks go to host memory and come back, whatever happens meanwhile."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.unit.kernel.policy_pool import random_policies
from tests.unit.kernel.setups import (
    answering,
    assert_served,
    complete,
    generate_statistics,
    image_request,
    make_limits,
    prefilled,
    submit_texts,
    tight,
    words,
)
from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.commands import Decide
from vsched.kernel.events import Encoded
from vsched.policy import Draft, Preemption
from vsched.policy_host import SeatPolicies
from vsched.policy_host.snapshot import encode_snapshot, restore_snapshot
from vsched.testing import ModelCluster, default_policies, make_request, run_random
from vsched.testing.cluster import random_limits

SWAP_YOUNGEST = answering("preemption", lambda view: Preemption(len(view.running) - 1, "swap"))
SWAPPING = default_policies(preemption=SWAP_YOUNGEST)


def swapping(**changes: Any) -> SchedulerLimits:
    """Tight limits, with room to swap."""
    return tight(**{"swap_blocks": 40, **changes})


def growing(limits: SchedulerLimits, policies: SeatPolicies = SWAPPING) -> ModelCluster:
    """Return a cluster with four requests that grow beyond the blocks."""
    cluster = ModelCluster(limits, policies)
    submit_texts(cluster, 4, 12, apart=20, max_tokens=24)
    return cluster


DRAFTING = {"drafts": True, "slots": 7}


@pytest.mark.parametrize(
    "limits",
    [
        {"generate_depth": 1, "prefix_cache": True},
        {"generate_depth": 2},
        {"generate_depth": 3},
        # Its number of computed tokens is known when it has settled: until then, the maximum is kept.
        {"generate_depth": 1, **DRAFTING},
        {"generate_depth": 3, **DRAFTING},
    ],
)
def test_swapped_request_goes_on_where_it_was(limits: dict[str, Any]) -> None:
    """It computes one token to join again, its last one, and its outputs are those of an undisturbed run."""
    three = answering("drafting", lambda view: Draft(min(3, view.rows_free), 0, 2))
    policies = default_policies(preemption=SWAP_YOUNGEST, drafting=three)
    cluster = growing(swapping(**limits), policies)
    cluster.drain()
    counts = generate_statistics(cluster)
    assert counts["swapped_out"] > 0
    assert counts["swapped_in"] > 0
    assert "prefix_cache" in limits or counts["swap_blocks_out"] == counts["swap_blocks_in"]
    assert prefilled(cluster) == 4 * 12 + counts["swapped_in"]
    assert_served(cluster, "r0", "r1", "r2", "r3")


def test_swap_without_room_recomputes() -> None:
    cluster = growing(swapping(swap_blocks=2))
    cluster.drain()
    assert generate_statistics(cluster)["preemptions"] > 0
    assert generate_statistics(cluster)["swapped_out"] == 0
    assert prefilled(cluster) > 4 * 12 + 4
    assert_served(cluster, "r0", "r1", "r2", "r3")


def test_swapped_images_are_not_encoded_again() -> None:
    """The KV blocks contain their results: no embedding is claimed to resume."""
    cluster = ModelCluster(swapping(pages=8), SWAPPING)
    for index in range(4):
        cluster.submit(image_request(f"r{index}", (b"image%d" % index, 10), max_tokens=24))
    cluster.drain()
    assert generate_statistics(cluster)["swapped_in"] > 0
    assert sum(map(len, cluster.encoded)) == 4
    assert_served(cluster, "r0", "r1", "r2", "r3")


def test_swap_copies_only_blocks_that_others_do_not_hold() -> None:
    """Blocks of a prefix that another request holds stay where they are, and both resume from them."""
    limits = make_limits(blocks=13, slots=2, swap_blocks=40, generate_depth=1)
    cluster = ModelCluster(limits, SWAPPING)
    prefix = words(16)  # 4 blocks
    cluster.submit(make_request("r0", [*prefix, 1, 2], max_tokens=28))
    cluster.run_generate()
    complete(cluster, make_request("r1", [*prefix, 3, 4], max_tokens=28))
    swaps = [one.swaps for one in cluster.decisions if one.swaps is not None]
    first = next(one for one in swaps if one.out)
    joins = [join for one in cluster.decisions for join in one.joined]
    shared = set(joins[0].blocks[:4])
    assert shared == set(joins[1].blocks[:4])
    assert not shared & set(first.out[::2])
    assert_served(cluster, "r0", "r1")


def test_swapped_request_is_restored_from_a_snapshot() -> None:
    """A scheduler that takes over while requests are swapped out has the same copies to make."""
    cluster = growing(swapping())
    while not generate_statistics(cluster)["swapped"] or cluster.kernel.statistics()["waiting"] < 1:
        cluster.run_generate()
    state = encode_snapshot(cluster.kernel)
    cluster.kernel = restore_snapshot(Scheduler(cluster.limits, SWAPPING), state)
    assert encode_snapshot(cluster.kernel) == state
    cluster.drain()
    assert generate_statistics(cluster)["swapped_in"] > 0
    assert_served(cluster, "r0", "r1", "r2", "r3")


def test_copies_of_a_request_that_ended_are_no_part_of_the_next_decision() -> None:
    """It swapped itself out when nothing else could run; a restored scheduler decides the same."""
    limits = make_limits(
        blocks=6, slots=2, prefix_cache=False, swap_blocks=6, generate_depth=1, encode_items=1
    )
    cluster = ModelCluster(limits, SWAPPING)
    cluster.submit(make_request("waits", words(9), [(8, 4, b"image")]))
    cluster.submit(make_request("swapped", words(4), max_tokens=20))
    while cluster.generators["generate"].log:
        cluster.run_generate()
    assert generate_statistics(cluster)["swapped"] == 1
    cluster.abort("swapped")
    restored = restore_snapshot(Scheduler(limits, SWAPPING), encode_snapshot(cluster.kernel))
    cluster.run_encode()
    (decision,) = cluster.generators["generate"].log
    assert decision.swaps is None
    event, now_ns = Encoded(1), cluster.now_ns
    assert Decide("generate", decision) in restored.handle(event, now_ns)
    cluster.drain()
    assert_served(cluster, "waits")


@pytest.mark.parametrize("seed", range(6))
def test_swapping_keeps_every_promise_under_random_schedules(seed: int) -> None:
    """With faults, aborts, draft tokens, shared prefixes and images, if every preemption swaps."""
    rng = random.Random(seed)
    drawn = random_policies(rng)
    by_table = {**drawn.by_table, "generate.preemption": SWAP_YOUNGEST}
    limits = msgspec.structs.replace(
        random_limits(rng), blocks=rng.randint(12, 40), swap_blocks=30, state_snapshots=None
    )
    run_random(rng, msgspec.structs.replace(drawn, by_table=by_table), limits=limits, events=160)
