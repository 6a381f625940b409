"""Snapshots of recurrent states: when they are taken, used and evicted."""

from __future__ import annotations

import pytest

from tests.unit.kernel.setups import assert_served, generate_statistics, make_limits, words
from vsched.kernel import Scheduler
from vsched.kernel.decisions import Join
from vsched.policy_host.snapshot import encode_snapshot, restore_snapshot
from vsched.testing import ModelCluster, default_policies, make_request
from vsched_policies.eviction import KeepNothing


def joins(cluster: ModelCluster) -> list[Join]:
    return [join for decision in cluster.decisions for join in decision.joined]


def writes(cluster: ModelCluster) -> list[tuple[int, int]]:
    return [
        (write.end, write.place)
        for decision in cluster.decisions
        for chunk in decision.chunks
        for write in chunk.writes
    ]


def serve(cluster: ModelCluster, name: str, text: list[int]) -> int:
    """Serve a request to its end; return the number of its cached tokens."""
    cluster.submit(make_request(name, text))
    assert_served(cluster, name)
    return cluster.ended[name].times.cached_tokens


def cluster_of(places: int | None, **changes: object) -> ModelCluster:
    return ModelCluster(make_limits(block_size=4, state_snapshots=places, **changes))


def test_next_turn_goes_on_from_the_last_end_of_a_block() -> None:
    """Of the last prompt: the blocks of the response are cached too, but without a state."""
    cluster = cluster_of(3)
    text = words(13)
    assert serve(cluster, "turn1", text) == 0
    assert writes(cluster) == [(12, 0)]
    longer = [*text, *cluster.outputs["turn1"], *words(9, start=50)]
    assert serve(cluster, "turn2", longer) == 12
    assert [join.restored for join in joins(cluster)] == [None, 0]
    assert serve(cluster, "turn2 again", longer) == (len(longer) - 1) // 4 * 4


def test_shared_beginning_is_kept_once_it_was_seen_twice() -> None:
    """The second request computes it again and leaves a snapshot at its end; the third resumes there."""
    cluster = cluster_of(8)
    shared = words(20)
    assert serve(cluster, "one", [*shared, *words(7, start=100)]) == 0
    assert serve(cluster, "two", [*shared, *words(7, start=200)]) == 0
    assert [end for end, _ in writes(cluster)] == [24, 20, 24]
    assert serve(cluster, "three", [*shared, *words(7, start=300)]) == 20


def test_snapshots_give_way_in_the_order_of_the_policy() -> None:
    cluster = cluster_of(2)
    texts = [words(9, start=100 * number) for number in range(3)]
    for number, text in enumerate(texts[:2]):
        serve(cluster, f"first {number}", text)
    assert serve(cluster, "again", texts[0]) == 8
    serve(cluster, "third", texts[2])
    assert serve(cluster, "the one used last is there", texts[0]) == 8
    assert serve(cluster, "the other went", texts[1]) == 0


@pytest.mark.parametrize("places", [0, 1])
def test_without_a_place_all_is_computed(places: int) -> None:
    """No snapshots at all, or a policy that keeps nothing."""
    policies = default_policies(generate_eviction=KeepNothing()) if places else None
    limits = make_limits(block_size=4, state_snapshots=places)
    cluster = ModelCluster(limits, policies)
    assert [serve(cluster, f"turn {number}", words(13)) for number in range(3)] == [0, 0, 0]


def test_preempted_request_goes_on_from_its_own_snapshot() -> None:
    cluster = cluster_of(4, blocks=10, slots=2)
    for number in range(2):
        cluster.submit(make_request(f"r{number}", words(9, start=100 * number), max_tokens=20))
    cluster.drain()
    assert generate_statistics(cluster)["preemptions"] > 0
    assert [join.computed for join in joins(cluster)][:3] == [0, 0, 8]
    for number in range(2):
        assert_served(cluster, f"r{number}")


def test_lost_group_has_no_snapshots() -> None:
    cluster = cluster_of(4)
    serve(cluster, "before", words(13))
    cluster.lose("generate")
    cluster.restore_group("generate")
    assert serve(cluster, "after", words(13)) == 0


def test_state_of_a_kernel_has_its_snapshots() -> None:
    cluster = cluster_of(2)
    serve(cluster, "first", words(13))
    state = encode_snapshot(cluster.kernel)
    other = restore_snapshot(Scheduler(cluster.limits, default_policies()), state)
    other.check_invariants()
    places = cluster.kernel.generators[0]._snapshots._places
    assert other.generators[0]._snapshots._places == places != {}
