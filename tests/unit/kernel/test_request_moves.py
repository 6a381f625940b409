"""Resources of requests as they move between queues, groups and slots."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.kernel.policy_pool import Reversed
from tests.unit.kernel.setups import (
    answering,
    assert_served,
    complete,
    crash,
    generate_statistics,
    image_request,
    joined,
    make_cluster,
    submit_texts,
    words,
)
from vsched.kernel.events import Drain, Resume
from vsched.policy import Admission, Policy
from vsched.probes import observed
from vsched.testing import ModelCluster, make_request
from vsched_policies.admission import Fifo
from vsched_policies.encoding import ChunkAware
from vsched_policies.eviction import KeepNothing

SECOND_NS = 1_000_000_000
FIRST = answering("routing", 0)
"""Always the first replica."""
VIEWS: list[Any] = []
WATCHING = answering("encoding", lambda view: range(len(view.items)), VIEWS)
"""Proposes all items."""


def claims(cluster: ModelCluster, key: bytes) -> int:
    """Number of requests that claim an item; 0 for an unknown item."""
    return sum(len(one.claims) for one in cluster.kernel.embeddings if one.item.key == key)


def preempted_prefill(*items: tuple[int, int, bytes], **limits: int) -> ModelCluster:
    """A cluster in which a prefill was preempted while the step that read its first image was in flight."""
    cluster = make_cluster(blocks=10, chunk_tokens=16, **limits, encode_eviction=KeepNothing())
    cluster.submit(make_request("old", words(2), max_tokens=30))
    length = sum(tokens for _, tokens, _ in items)
    cluster.submit(make_request("young", words(36 - length), items, max_tokens=2))
    cluster.run_encode()
    while "young" not in joined(cluster):
        cluster.run_generate()
    cluster.run_generate()
    assert "preempted" in cluster.kernel.explain("young")
    return cluster


def test_claim_on_an_image_that_lies_in_the_cached_prefix_is_dropped() -> None:
    """Otherwise it would block its request's next image for ever: pages are never taken from an older claim."""
    cluster = preempted_prefill((0, 16, b"a"), (0, 16, b"b"), pages=4)
    cluster.run_generate()
    assert (claims(cluster, b"a"), claims(cluster, b"b")) == (0, 1)
    cluster.run_encode()
    assert cluster.encoded == [[b"a"], [b"b"]]
    assert_served(cluster, "old", "young")


def test_embedding_of_a_preempted_prefill_stays_until_it_joins_again() -> None:
    """The step that read it is over by then, but its result is gone."""
    cluster = preempted_prefill((0, 16, b"a"), prefix_cache=False)
    cluster.drain()
    assert cluster.encoded == [[b"a"]]
    preemptions = generate_statistics(cluster)["preemptions"]
    assert cluster.ended["young"].times.preemptions == preemptions
    assert_served(cluster, "old", "young")


def test_image_that_ends_where_the_cached_prefix_ends_is_not_claimed() -> None:
    """Whatever the policy proposes, as long as a later image is to come."""
    VIEWS.clear()
    cluster = make_cluster(slots=1, encoding=WATCHING)
    complete(cluster, make_request("first", words(8), [(0, 16, b"a")], max_tokens=1))
    cluster.submit(make_request("running", words(3, start=70), max_tokens=9))
    later = make_request("later", words(8, start=90), [(0, 16, b"a"), (20, 16, b"b")], max_tokens=1)
    cluster.submit(later)
    assert [view.chunk_start for view in VIEWS if view.arriving] == [0, 16]
    assert (claims(cluster, b"a"), claims(cluster, b"b")) == (0, 1)
    assert_served(cluster, "first", "running", "later")


def test_policy_sees_a_new_request_once_and_none_whose_images_are_consumed() -> None:
    VIEWS.clear()
    limits = {"chunk_tokens": 16, "batch_tokens": 16, "generate_depth": 1}
    cluster = make_cluster(**limits, encoding=WATCHING)
    cluster.submit(make_request("r", words(40), [(0, 16, b"a"), (16, 16, b"b")]))
    cluster.run_encode()
    cluster.run_generate()
    crash(cluster)
    cluster.drain()
    assert [view.arriving for view in VIEWS].count(True) == 1
    assert VIEWS[0].arriving
    assert len(VIEWS) > 3
    assert all(view.items[-1].stop > view.chunk_start for view in VIEWS)
    assert_served(cluster, "r")


def test_request_suspended_by_a_draining_group_claims_nothing() -> None:
    """Preempted while its only group drains, it would keep embeddings from others until the group is back."""
    cluster = make_cluster(
        blocks=14,
        slots=4,
        prefix_cache=False,
        chunk_tokens=8,
        generate_depth=1,
        encoding=ChunkAware(look_ahead_chunks=9),
    )
    cluster.submit(make_request("old", words(12), max_tokens=40))
    cluster.submit(make_request("young", words(30), [(0, 8, b"a"), (25, 8, b"b")], max_tokens=2))
    cluster.send(Drain("generate"))
    cluster.drain()
    assert not any(one.claims for one in cluster.kernel.embeddings)
    cluster.send(Resume("generate"))
    assert_served(cluster, "old", "young")


def test_times_of_a_request_are_those_of_the_first_time() -> None:
    cluster = make_cluster(image_request("r", (b"a", 16), max_tokens=6), generate_depth=1)
    cluster.wait(SECOND_NS)
    cluster.run_encode()
    ready_ns = cluster.now_ns
    cluster.wait(SECOND_NS)
    cluster.run_generate()
    first_ns = cluster.now_ns
    cluster.wait(SECOND_NS)
    cluster.lose("generate")
    cluster.wait(SECOND_NS)
    cluster.restore_group("generate")
    cluster.drain()
    times = cluster.ended["r"].times
    assert (times.items_ready_ns, times.admitted_ns) == (ready_ns, ready_ns)
    assert times.first_token_ns == first_ns
    assert_served(cluster, "r")


@pytest.mark.parametrize("how", ["lost", "preempted"])
def test_load_of_a_group_counts_the_tokens_of_preempted_requests(how: str) -> None:
    """Prompts and outputs, waiting or running; otherwise the router would send too much there."""
    cluster = make_cluster(blocks=10, prefix_cache=False)
    names = submit_texts(cluster, 4, 6, max_tokens=20)
    group = cluster.kernel.generators[0]
    while not generate_statistics(cluster)["preemptions"]:
        cluster.run_generate()
    if how == "lost":
        cluster.lose("generate")
        outputs = sum(len(cluster.outputs[name]) for name in names if name not in cluster.ended)
        assert group.load_tokens == 6 * 4 + outputs
        cluster.restore_group("generate")
    else:
        cluster.run_generate()
        cluster.run_generate()
        assert group.load_tokens >= 6 * 4
    cluster.drain()
    assert group.load_tokens == 0
    assert_served(cluster, *names)


def test_limit_of_a_step_is_shorter_the_more_requests_decode_for_a_waiting_one() -> None:
    """A long prompt next to many streams takes short steps; a queue of prompts takes long ones."""
    cluster = make_cluster(slots=16, blocks=400, batch_tokens=64, step_target_ns=50_000_000)
    group, found = cluster.kernel.generators[0], []
    for number in range(16):
        cluster.submit(make_request(f"r{number}", words(5), max_tokens=60))
        while group.decoding <= number:
            cluster.run_generate()
        if group.decoding in (8, 16):
            found.append(group.decode_slack_ns)
    for name in ("first", "second"):
        cluster.submit(make_request(name, words(400)))
        found.append(group.decode_slack_ns)
    cluster.kernel.check_invariants()
    assert [one / found[0] for one in found] == pytest.approx([1, 0.5, 0.5, 1], rel=0.01)
    assert found[0] == pytest.approx(50_000_000 * 5 / 8, rel=0.01)


def test_waiting_request_is_shown_with_the_tokens_that_its_cached_prefix_leaves() -> None:
    tokens: list[list[int]] = []

    def note(view: Any) -> Admission:
        tokens.append([entry.tokens for entry in view.waiting])
        return Admission([0])

    cluster = make_cluster(generate_admission=answering("admission", note))
    complete(cluster, make_request("first", words(21)), make_request("second", words(21)))
    assert tokens == [[21], [1]]
    assert_served(cluster, "first", "second")


@pytest.mark.parametrize(("admission", "leaves"), [(Fifo(), True), (Reversed(), False)])
def test_those_behind_a_front_without_room_join_when_it_leaves_or_the_policy_wants_it(
    admission: Policy, *, leaves: bool
) -> None:
    """At once, and not when something else changes; a policy sees what arrives behind the front."""
    cluster = make_cluster(
        blocks=8, prefix_cache=False, generate_depth=1, generate_admission=admission
    )
    cluster.submit(make_request("runs", words(12), max_tokens=12))
    cluster.submit(make_request("large", words(28, start=50), max_tokens=2))
    cluster.run_generate()
    cluster.submit(make_request("small", words(2, start=90), max_tokens=2))
    if leaves:
        cluster.run_generate()
        assert joined(cluster) == ["runs"]
        cluster.abort("large")
    cluster.run_generate()
    assert joined(cluster) == ["runs", "small"]
    assert_served(cluster, "runs", "small", *["large"] * (not leaves))


def test_policy_decides_which_request_joins_first_after_a_restart() -> None:
    """Nothing could run, so nothing was stuck, and the front needs no precedence."""
    cluster = make_cluster(slots=1, generate_admission=Reversed())
    cluster.lose("generate")
    submit_texts(cluster, 3, 5)
    with observed() as reached:
        cluster.restore_group("generate")
        cluster.drain()
    assert joined(cluster) == ["r2", "r1", "r0"]
    assert not reached["kernel.stall_unblocked"]


def test_drain_of_a_lost_group_changes_nothing() -> None:
    """It comes back with all requests that it gets then."""
    cluster = make_cluster(generators=2, routing=FIRST)
    cluster.lose("generate-0")
    cluster.send(Drain("generate-0"))
    groups = cluster.kernel.statistics()["generate"]["groups"]
    assert groups["generate-0"]["state"] == "down"
    assert cluster.drained == []
    cluster.restore_group("generate-0")
    cluster.submit(make_request("r", words(5)))
    assert cluster.busy("generate") == ["generate-0"]
    assert_served(cluster, "r")


def test_draining_group_waits_for_images_of_requests_that_ran_when_it_was_lost() -> None:
    """No other group accepts it, though it holds no slot and its image is yet to be encoded."""
    cluster = make_cluster(
        generators=2, prefix_cache=False, routing=FIRST, encode_eviction=KeepNothing()
    )
    cluster.submit(image_request("r", (b"a", 16), max_tokens=20))
    cluster.run_encode()
    for _ in range(3):
        cluster.run_generate()
    cluster.lose("encode")
    crash(cluster, "generate-0")
    cluster.send(Drain("generate-0"))
    assert cluster.drained == []
    cluster.restore_group("encode")
    cluster.drain()
    assert cluster.drained == ["generate-0"]
    assert_served(cluster, "r")


def test_request_preempted_in_a_draining_group_goes_on_in_another() -> None:
    """And the ranks that it left forget it."""
    cluster = make_cluster(generators=2, blocks=10, routing=FIRST)
    names = submit_texts(cluster, 4, 6, max_tokens=20)
    cluster.run_generate("generate-0")
    cluster.send(Drain("generate-0"))
    while cluster.busy("generate") != ["generate-0", "generate-1"]:
        cluster.run_generate("generate-0")
    cluster.run_generate("generate-0")
    cluster.run_generate("generate-0")
    there = cluster.generators["generate-0"].sequences.keys()
    assert not there & cluster.generators["generate-1"].sequences.keys()
    cluster.drain()
    cluster.send(Resume("generate-0"))
    complete(cluster, make_request("next", words(6, start=900), max_tokens=2))
    known = {cluster.names[number] for number in cluster.generators["generate-0"].sequences}
    assert known <= {"next"}
    assert cluster.drained == ["generate-0"]
    assert_served(cluster, *names)


def test_suspect_comes_back_after_a_restart_that_an_operator_requested() -> None:
    """It was in quarantine, and no request is to blame for the restart."""
    cluster = make_cluster()
    submit_texts(cluster, 2, 5, max_tokens=20)
    for planned in (False, False, True):
        cluster.run_generate()
        cluster.run_generate()
        cluster.lose("generate", planned=planned)
        cluster.restore_group("generate")
    assert_served(cluster, "r0", "r1")
