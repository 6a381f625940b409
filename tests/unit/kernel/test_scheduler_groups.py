"""Several groups: one queue for all encoders, a router for the generators, and groups that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.kernel.setups import (
    answering,
    assert_served,
    complete,
    encode_statistics,
    generate_statistics,
    image_request,
    make_cluster,
    make_limits,
    submit_texts,
    words,
)
from vsched.aio.arrivals import refusal_error
from vsched.failures import ErrorKind, StartFailed
from vsched.kernel import Scheduler
from vsched.kernel.events import Drain, GroupRetired
from vsched.policy_host.snapshot import encode_snapshot, restore_snapshot
from vsched.testing import ModelCluster, default_policies, make_request
from vsched.types import FinishReason

SEEN: list[tuple[list[tuple[int, int, int]], int]] = []


def last_replica(view: Any) -> int:
    """The last replica; records loads, cached prefixes and seen images of all, and the limit of loads."""
    facts = [(one.load_tokens, one.prefix_tokens, one.items_seen) for one in view.replicas]
    SEEN.append((facts, view.load_limit_tokens))
    return len(view.replicas) - 1


FIRST, LAST = answering("routing", 0), answering("routing", last_replica)


def text(name: str, *, start: int = 10, length: int = 6, max_tokens: int = 9) -> Any:
    return make_request(name, words(length, start=start), max_tokens=max_tokens)


def test_encoders_share_one_line() -> None:
    cluster = make_cluster(encoders=2, encode_items=4)
    cluster.lose("encode-0")
    cluster.lose("encode-1")
    images = [(b"%d" % number, 4) for number in range(10)]
    cluster.submit(image_request("r", *images))
    cluster.restore_group("encode-0")
    cluster.restore_group("encode-1")
    sent = {name: [task.key for task in log[0].tasks] for name, log in cluster.encode_logs.items()}
    assert sent == {"encode-0": [b"0", b"1", b"2", b"3"], "encode-1": [b"4", b"5", b"6", b"7"]}
    cluster.run_encode("encode-1")
    assert [task.key for task in cluster.encode_logs["encode-1"][0].tasks] == [b"8", b"9"]
    assert_served(cluster, "r")


def test_router_shows_loads_in_tokens() -> None:
    """The load of a replica: tokens of prompts and outputs that are not pulled, waiting or running there."""
    cluster = make_cluster(generators=2, slots=1, generate_depth=1, routing=LAST)
    cluster.submit(text("running", length=6, max_tokens=9))
    cluster.submit(text("waiting", start=50, length=10))
    cluster.submit(image_request("not pulled", (b"a", 7)))
    for _ in range(3):
        cluster.run_generate("generate-1")
    cluster.submit(text("asked", start=90))
    facts, limit = SEEN[-1]
    assert [load for load, _, _ in facts] == [0, 6 + 4 + 10 + 8]  # including a step in flight
    assert limit == cluster.limits.blocks * cluster.limits.block_size
    cluster.drain()
    assert generate_statistics(cluster)["load_tokens"] == 0
    cluster.lose("generate-0")
    cluster.restore_group("generate-0", cluster.limits.blocks_min)
    cluster.submit(text("asked again"))
    assert SEEN[-1][1] == cluster.limits.blocks_min * cluster.limits.block_size


def test_router_shows_prefixes_and_images_that_a_replica_has_seen() -> None:
    cluster = make_cluster(generators=2, routing=LAST)
    complete(cluster, image_request("first", (b"a", 8), (b"b", 8)))
    cluster.submit(image_request("second", (b"a", 8), (b"c", 8)))
    facts, _ = SEEN[-1]
    assert [(prefix, items) for _, prefix, items in facts] == [(0, 0), (8, 1)]
    cluster.drain()


def test_lost_generator_keeps_running_requests_and_gives_waiting_ones_away() -> None:
    cluster = make_cluster(text("ran"), generators=2, slots=1, routing=FIRST)
    cluster.submit(text("waited", start=60))
    cluster.run_generate("generate-0")
    cluster.lose("generate-0")
    assert cluster.restarts == ["generate-0"]
    assert_served(cluster, "waited")
    assert "waiting for its group" in cluster.kernel.explain("ran")
    cluster.restore_group("generate-0")
    assert_served(cluster, "ran")


def test_lost_generator_does_not_keep_embeddings_from_others() -> None:
    """An older request that waits for its group claims nothing that a younger one could use."""
    # round-robin
    cluster = make_cluster(generators=2, pages=4, page_rows=4, prefix_cache=False)
    cluster.submit(image_request("older", (b"a", 16), max_tokens=20))
    cluster.run_encode()
    cluster.run_generate("generate-0")
    cluster.lose("generate-0")
    cluster.submit(image_request("younger", (b"b", 16)))
    assert_served(cluster, "younger")
    cluster.restore_group("generate-0")
    assert_served(cluster, "older")


@pytest.mark.parametrize("stage", ["encode", "generate"])
def test_last_retired_group_ends_everything(stage: str) -> None:
    cluster = make_cluster(encoders=2, generators=2)
    for index in range(2):
        cluster.lose(f"{stage}-{index}")
    cluster.submit(image_request("r", (b"a", 4)))
    for name in (f"{stage}-0", f"{stage}-1"):
        failure = StartFailed((name,), ErrorKind.INTERNAL, "it would not start")
        cluster.send(GroupRetired(name, failure))
    assert cluster.ended["r"].code == "given_up"
    cluster.submit(text("late"))
    refusal = refusal_error(cluster.refused["late"])
    assert (refusal.code, refusal.status) == ("given_up", 503)
    assert f"{stage}-1 could not be restarted. Remedy: restart the server" in refusal.message
    assert cluster.kernel.given_up == f"{stage}-1 could not be restarted"


def pages_out(cluster: ModelCluster, group: str) -> set[int]:
    return {page for task in cluster.encode_logs[group][0].tasks for page in task.pages}


@pytest.mark.parametrize("end", [ModelCluster.restore_group, ModelCluster.retire])
def test_pages_that_a_lost_encoder_may_write_to_are_kept_from_others(
    end: Callable[[ModelCluster, str], None],
) -> None:
    """Until its ranks are gone, which is certain once the group is back or given up."""
    cluster = make_cluster(encoders=2, encode_items=1)
    cluster.submit(image_request("r", (b"a", 8), (b"b", 8), (b"c", 8), (b"d", 8)))
    orphaned = pages_out(cluster, "encode-0")
    cluster.lose("encode-0")
    while cluster.busy("encode"):
        assert not pages_out(cluster, "encode-1") & orphaned
        cluster.run_encode()
    assert encode_statistics(cluster)["pages_orphaned"] == len(orphaned)
    end(cluster, "encode-0")
    assert encode_statistics(cluster)["pages_orphaned"] == 0
    assert_served(cluster, "r")


def test_group_serves_all_its_requests_with_fewer_blocks_until_it_comes_back_with_all() -> None:
    """Memory ran out. The largest request still fits; the next loss may give all blocks back."""
    limits = make_limits(blocks=40, context_tokens=64, generators=2)
    cluster = ModelCluster(limits)

    def blocks_of(kernel: Scheduler) -> list[int]:
        groups = kernel.statistics()["generate"]["groups"]
        return [groups[name]["blocks_total"] for name in ("generate-0", "generate-1")]

    names = submit_texts(cluster, 8, 40, apart=100, max_tokens=24)
    cluster.run_generate()
    cluster.lose("generate-1")
    assert limits.blocks_min < limits.blocks
    cluster.restore_group("generate-1", limits.blocks_min)
    state = encode_snapshot(cluster.kernel)
    restored = restore_snapshot(Scheduler(limits, default_policies()), state)
    for kernel in (cluster.kernel, restored):
        assert blocks_of(kernel) == [limits.blocks, limits.blocks_min]
    assert_served(cluster, *names)
    cluster.lose("generate-1")
    cluster.restore_group("generate-1")
    assert blocks_of(cluster.kernel) == [limits.blocks] * 2


def test_draining_the_only_generator_holds_requests_until_it_is_back() -> None:
    """No request is refused for it; waiting ones wait a little longer."""
    cluster = make_cluster(image_request("runs", (b"a", 8), max_tokens=5), slots=1)
    cluster.run_encode()
    cluster.send(Drain("generate"))
    complete(cluster, image_request("waits", (b"b", 8)))
    assert cluster.drained == ["generate"]
    assert cluster.unserved()
    assert "generate is draining" in cluster.kernel.explain("waits")
    cluster.lose("generate")  # it is restarted
    assert cluster.ended["runs"].reason is FinishReason.LENGTH
    cluster.restore_group("generate")
    assert_served(cluster, "waits")


def test_requests_waiting_for_a_draining_generator_go_to_the_first_that_comes_up() -> None:
    cluster = make_cluster(generators=2, slots=1)
    cluster.lose("generate-1")
    cluster.submit(text("runs", max_tokens=30))
    cluster.submit(text("waits", start=60))
    cluster.send(Drain("generate-0"))
    assert "generate-0 is draining" in cluster.kernel.explain("waits")
    cluster.restore_group("generate-1")
    assert cluster.generators["generate-1"].log[0].joined
    assert_served(cluster, "runs", "waits")


def test_draining_encoder_finishes_its_batch() -> None:
    cluster = make_cluster(image_request("r", (b"a", 8)), encoders=2)
    cluster.send(Drain("encode-0"))
    cluster.submit(image_request("s", (b"b", 8)))
    assert [log[0].tasks[0].key for log in cluster.encode_logs.values()] == [b"a", b"b"]
    assert not cluster.drained
    cluster.drain()
    assert cluster.drained == ["encode-0"]
    assert_served(cluster, "r", "s")


def test_waiting_requests_expire_by_number_wherever_they_stand() -> None:
    """Each at its own time, though others ahead and behind have left; started requests do not expire."""
    cluster = make_cluster(text("runs", max_tokens=200), slots=1, waiting_ns=1_000_000_000)
    for number in range(4):
        cluster.wait(100_000_000)
        cluster.submit(text(f"w{number}", start=60))
    cluster.abort("w1")
    cluster.wait(950_000_000)
    assert cluster.ended["w0"].code == "expired"
    assert "waited for its first step for 1 s" in cluster.ended["w0"].message
    assert sorted(cluster.ended) == ["w0", "w1", "w2"], "w1 left by itself, w2 expired by now"
    cluster.wait(100_000_000)
    assert sorted(cluster.ended) == ["w0", "w1", "w2", "w3"]
    assert_served(cluster, "runs")
