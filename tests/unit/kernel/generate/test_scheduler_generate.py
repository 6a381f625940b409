"""The generate stage: steps one ahead, decisions that carry only changes, growth and preemption."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.kernel.setups import (
    answering,
    assert_served,
    generate_statistics,
    image_request,
    joined,
    make_cluster,
    make_limits,
    submit_texts,
    words,
)
from vsched.kernel.decisions import GenerateDecision
from vsched.kernel.limits import SchedulerLimits
from vsched.policy import Admission
from vsched.policy_host import SeatPolicies
from vsched.testing import ModelCluster, default_policies, make_request


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_generate_decisions_go_out_ahead_of_results(depth: int) -> None:
    cluster = make_cluster(make_request("r", words(5), max_tokens=8), generate_depth=depth)
    assert len(cluster.generate_log) == depth
    most = 0
    while cluster.generate_log:
        most = max(most, len(cluster.generate_log))
        cluster.run_generate()
    assert most == depth
    assert_served(cluster, "r")


def test_generate_steady_decode_decisions_name_only_growth() -> None:
    """Cost follows change: with no arrival and no finish a decision is its number, and new blocks."""
    cluster = make_cluster(block_size=4, slots=4)
    submit_texts(cluster, 4, 4, apart=20, max_tokens=40)
    while sum(len(step.joined) for step in cluster.decisions) < 4:
        cluster.run_generate()
    start = len(cluster.decisions)
    for _ in range(24):
        cluster.run_generate()
    steady = cluster.decisions[start:]
    assert len(steady) == 24
    for decision in steady:
        assert decision == GenerateDecision(decision.step, grown=decision.grown)
        assert decision.grown or len(msgspec.msgpack.encode(decision)) < 16
    grown = [slot for decision in steady for slot in decision.grown[::2]]
    assert sorted(grown) == sorted([0, 1, 2, 3] * 6), "each slot grows once in block_size steps"
    assert_served(cluster, "r0", "r1", "r2", "r3")


def test_generate_step_never_exceeds_its_token_budget() -> None:
    cluster = make_cluster(batch_tokens=12, chunk_tokens=8, slots=4, prefix_cache=False)
    for index in range(6):
        cluster.submit(make_request(f"r{index}", words(15, start=index), max_tokens=9))
    decoding: set[int] = set()
    while cluster.generate_log:
        decision = cluster.generate_log[0]
        for leave in decision.left:
            decoding.discard(leave.slot)
        tokens = sum(chunk.stop - chunk.start for chunk in decision.chunks)
        assert tokens + len(decoding) <= 12
        decoding |= {chunk.slot for chunk in decision.chunks if chunk.stop == 15}
        cluster.run_generate()
    assert_served(cluster, *(f"r{index}" for index in range(6)))


def tight(**changes: object) -> SchedulerLimits:
    """Limits under which four requests start and not all can grow."""
    return make_limits(**{"blocks": 14, "slots": 4, "prefix_cache": False, **changes})


def run_preempted(policies: SeatPolicies | None = None) -> tuple[ModelCluster, list[list[str]]]:
    """Run four growing requests and a late one; return the states of older requests at each join."""
    cluster = ModelCluster(tight(), policies)
    submit_texts(cluster, 4, 12, apart=20, max_tokens=24)
    cluster.submit(make_request("r4", words(12, start=200), max_tokens=2))
    passed: list[list[str]] = []
    while cluster.generate_log:
        seen = len(cluster.decisions)
        cluster.run_generate()
        for decision in cluster.decisions[seen:]:
            for join in decision.joined:
                name = cluster.names[join.number]
                older = [f"r{index}" for index in range(5) if f"r{index}" < name]
                passed.append([f"{one}: {cluster.kernel.explain(one)}" for one in older])
    return cluster, passed


NAMES = ("r0", "r1", "r2", "r3", "r4")


def test_generate_preempted_requests_return_in_their_order() -> None:
    cluster, passed = run_preempted()
    explained = [text for older in passed for text in older]
    assert not any("waiting for a slot" in text for text in explained), (
        "a younger request took a slot while an older one waited"
    )
    assert not any("preempted" in text for text in explained), (
        "a younger request took what a preempted one gave up, which returns after a step"
    )
    joins = [[cluster.names[join.number] for join in step.joined] for step in cluster.decisions]
    assert ["r1", "r2"] in joins, "two preempted requests return together, the older first"
    assert joined(cluster).index("r4") > max(joined(cluster).index(name) for name in NAMES[:4])
    assert [cluster.ended[name].times.preemptions > 0 for name in NAMES[:4]] == [
        False,  # the oldest is never preempted
        True,
        True,
        True,
    ]
    returns = len(joined(cluster)) - 5
    ended_out = 1  # r4 was given up in the step with its last token: it need not return
    assert generate_statistics(cluster)["preemptions"] == returns + ended_out
    assert_served(cluster, *NAMES)


def test_generate_older_request_is_never_preempted_for_a_younger() -> None:
    """Whatever the policy decides, a request is preempted for older ones only, which ensures progress."""
    cluster = ModelCluster(tight(blocks=6), default_policies(preemption=answering("preemption", 0)))
    cluster.submit(make_request("old", words(9), max_tokens=4))  # never needs another block
    cluster.submit(make_request("young", words(12, start=50), max_tokens=8))
    assert_served(cluster, "old", "young")
    assert cluster.ended["old"].times.preemptions == 0
    assert cluster.ended["young"].times.preemptions > 0


def test_generate_request_waits_while_its_blocks_are_taken() -> None:
    cluster = make_cluster(blocks=8, slots=4, prefix_cache=False, generate_depth=1)
    cluster.submit(make_request("first", words(20), max_tokens=4))
    cluster.submit(make_request("second", words(20, start=50), max_tokens=4))
    cluster.submit(make_request("third", words(2, start=90), max_tokens=2))
    assert joined(cluster) == ["first"]
    assert "needs 5 KV blocks" in cluster.kernel.explain("second")
    cluster.drain()
    assert joined(cluster) == ["first", "second", "third"]
    assert_served(cluster, "first", "second", "third")


def hold(view: Any) -> Admission:
    """Hold everything for a millisecond, then admit in order."""
    if view.now_ns < 1_000_000:
        return Admission(hold_until_ns=1_000_000)
    return Admission(range(min(view.entries_free, len(view.waiting))))


@pytest.mark.parametrize("seat", ["encode_admission", "generate_admission"])
def test_scheduler_hold_sets_one_timer_and_its_time_ends_it(seat: str) -> None:
    """Held entries are examined again at that time; no call comes in between."""
    calls: list[Any] = []
    cluster = make_cluster(**{seat: answering("admission", hold, calls)})
    for name in ("r1", "r2"):
        cluster.submit(image_request(name, (name.encode(), 8)))
    while cluster.busy("encode"):
        cluster.run_encode()
    assert (cluster.decisions, cluster.timers, len(calls)) == ([], [1_000_000], 1)
    cluster.wait(1_000_000)
    assert_served(cluster, "r1", "r2")
    if seat == "encode_admission":
        assert cluster.encoded == [[b"r1", b"r2"]]
