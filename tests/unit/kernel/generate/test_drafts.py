"""Grants of draft tokens: eligible requests, the blocks they need, and the checks of results."""

from __future__ import annotations

import msgspec

from tests.unit.kernel.setups import (
    answering,
    assert_served,
    complete,
    generate_statistics,
    make_limits,
    words,
)
from vsched.kernel import SchedulerLimits
from vsched.kernel.decisions import DraftGrant
from vsched.policy import Draft, DraftingView
from vsched.testing import ModelCluster, default_policies, make_request

DRAFTS = make_limits(drafts=True, slots=8)


def cluster_of(
    *grants: Draft, limits: SchedulerLimits = DRAFTS
) -> tuple[ModelCluster, list[DraftingView]]:
    """Return a cluster whose policy gives these grants, the last one again and again, and the views that it gets."""
    seen: list[DraftingView] = []

    def next_grant(_: DraftingView) -> Draft:
        return grants[min(len(seen), len(grants)) - 1]

    policy = answering("drafting", next_grant, seen)
    return ModelCluster(limits, default_policies(drafting=policy)), seen


def granted(cluster: ModelCluster) -> list[tuple[int, list[DraftGrant]]]:
    return [(one.step, one.granted) for one in cluster.decisions if one.granted]


def test_a_request_is_granted_drafts_with_its_first_token_and_until_they_are_over() -> None:
    cluster, seen = cluster_of(Draft(3, 4, 2), Draft(0, 5, 0), Draft(3, 0, 2))
    complete(cluster, make_request("a", words(9), max_tokens=60))
    assert granted(cluster)[:3] == [
        (1, [DraftGrant(0, 3, 2)]),
        (6, [DraftGrant(0, 0, 0)]),
        (11, [DraftGrant(0, 3, 2)]),
    ]
    first, second, third = seen
    assert (first.outputs, first.outputs_max, first.last, first.rows_free) == (1, 60, None, 7)
    assert (second.last, second.running) == (Draft(3, 4, 2), 1)
    # One step ahead, results of three of the four steps are known.
    assert second.drafted == 9
    assert 0 < second.accepted < 9
    assert (third.drafted, third.last) == (3, Draft(0, 5, 0))
    assert_served(cluster, "a")
    counts = generate_statistics(cluster)
    assert counts["steps"] < 60
    assert counts["tokens_decoded"] == 60  # including the step ahead of the end
    assert 0 < counts["drafts_accepted"] < counts["tokens_drafted"]


def test_a_step_without_grants_is_unchanged() -> None:
    """The same decisions, blocks and buckets; the policy is called once per request."""
    plain = ModelCluster(msgspec.structs.replace(DRAFTS, drafts=False), default_policies())
    requested, seen = cluster_of(Draft())
    for cluster in (plain, requested):
        for name in "abc":
            cluster.submit(make_request(name, words(5), max_tokens=30))
        cluster.drain()
    assert requested.decisions == plain.decisions
    assert len(seen) == 3
    never, silent = cluster_of(Draft(3), limits=msgspec.structs.replace(DRAFTS, drafts=False))
    never.submit(make_request("a", words(5), max_tokens=30))
    never.drain()
    assert not silent


def test_drafts_take_no_block_that_another_may_need() -> None:
    """Three requests with exactly the blocks they need at their ends: none is preempted for draft tokens."""
    limits = msgspec.structs.replace(DRAFTS, blocks=3 * 4, context_tokens=64)
    cluster, _ = cluster_of(Draft(2, 0, 1), limits=limits)
    for name in "abc":
        cluster.submit(make_request(name, words(4, start=10 * ord(name)), max_tokens=12))
    cluster.drain()
    assert generate_statistics(cluster)["preemptions"] == 0
    assert generate_statistics(cluster)["drafts_accepted"] > 0
    assert_served(cluster, "a", "b", "c")


def test_grants_go_when_requests_take_the_slots() -> None:
    """No step samples more rows than there are slots; the model rank asserts it, too."""
    limits = msgspec.structs.replace(DRAFTS, slots=4)
    cluster, seen = cluster_of(Draft(8, 0, 1), limits=limits)
    cluster.submit(make_request("a", words(5), max_tokens=200))
    for _ in range(3):
        cluster.run_generate()
    assert granted(cluster) == [(1, [DraftGrant(0, 3, 1)])]  # cut to the free slots
    for name in "bcd":
        cluster.submit(make_request(name, words(5, start=10 * ord(name)), max_tokens=8))
        cluster.run_generate()
    assert DraftGrant(0, 0, 1) in [one for _, grants in granted(cluster) for one in grants]
    requested = len(seen)
    assert_served(cluster, "a", "b", "c", "d")
    assert len(seen) > requested, "the policy was not called again when slots were free"
