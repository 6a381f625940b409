"""Policies at work in the kernel: permits, counters, look-ahead, and number of calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.kernel.setups import (
    Gathering,
    assert_holds_nothing,
    assert_served,
    generate_statistics,
    image_request,
    joined,
    make_limits,
    words,
)
from vsched.plugins import RegisteredPolicy, list_policies, resolve_policy
from vsched.policy import RequestPolicy
from vsched.policy_host.seats import Ask
from vsched.testing import ModelCluster, check_policy, default_policies, make_request
from vsched_policies.admission import Fifo, Priority
from vsched_policies.encoding import ChunkAware

ROOT = Path(__file__).parents[2]
REGISTERED = list_policies()
FIELDS: dict[str, dict[str, Any]] = {"pinned": {"tokens": 64}}
SEEDS = range(4)
"""Schedules of 80 events; each runs twice."""
ADMISSION = pytest.mark.parametrize(
    "registered",
    [policy for policy in REGISTERED if policy.kind == "admission"],
    ids=lambda policy: policy.name,
)


@pytest.mark.parametrize(
    "registered", REGISTERED, ids=lambda policy: f"{policy.kind}-{policy.name}"
)
def test_policy_passes_random_schedules(registered: RegisteredPolicy) -> None:
    """All resources are returned on every path, and the same run repeats exactly."""
    fields = FIELDS.get(registered.name, {})
    policy = resolve_policy(registered.kind, {"use": registered.name, **fields})
    check_policy(policy, seeds=SEEDS)


def admission(registered: RegisteredPolicy) -> RequestPolicy:
    policy = resolve_policy("admission", {"use": registered.name})
    assert isinstance(policy, RequestPolicy)
    return policy


@ADMISSION
def test_admission_returns_the_rest_when_permits_run_out(registered: RegisteredPolicy) -> None:
    """3 items and 2 permits are a batch of 2, then the third; the permits come back each time."""
    policies = default_policies(encode_admission=admission(registered))
    cluster = ModelCluster(make_limits(encode_items=2), policies)
    cluster.lose("encode")
    for name in ("a", "b", "c"):
        cluster.submit(image_request(name, (name.encode(), 8)))
    cluster.wait(1_000_000_000)
    cluster.restore_group("encode")
    cluster.drain()
    assert cluster.encoded == [[b"a", b"b"], [b"c"]]
    assert_served(cluster, "a", "b", "c")
    assert_holds_nothing(cluster)


@ADMISSION
def test_admission_refused_request_changes_nothing(registered: RegisteredPolicy) -> None:
    """A request that waits for blocks holds no slot and no block meanwhile, and counts as admitted only afterwards."""
    policies = default_policies(generate_admission=admission(registered))
    cluster = ModelCluster(make_limits(blocks=10, slots=3, prefix_cache=False), policies)
    cluster.submit(make_request("first", words(20), max_tokens=4))
    cluster.wait(1_000_000_000)
    before = generate_statistics(cluster)
    cluster.submit(make_request("second", words(24, start=50), max_tokens=4))
    cluster.wait(1_000_000_000)
    after = generate_statistics(cluster)
    assert (before["admitted"], before["prefilling"] + before["decoding"]) == (1, 1)
    assert after == {**before, "waiting": 1, "load_tokens": after["load_tokens"]}
    assert_served(cluster, "first", "second")
    assert generate_statistics(cluster)["admitted"] == 2


@ADMISSION
def test_admission_refused_request_does_not_hold_its_cached_prefix(
    registered: RegisteredPolicy,
) -> None:
    """Nothing is allocated for a request, not even shared blocks, before everything it needs is available."""
    policies = default_policies(generate_admission=admission(registered))
    cluster = ModelCluster(make_limits(blocks=9, slots=3), policies)
    cluster.submit(make_request("first", words(20), max_tokens=4))
    cluster.wait(1_000_000_000)
    before = generate_statistics(cluster)
    cluster.submit(make_request("second", [*words(16), *words(17, start=90)], max_tokens=3))
    cluster.wait(1_000_000_000)
    after = generate_statistics(cluster)
    assert after == {**before, "waiting": 1, "load_tokens": before["load_tokens"] + 33}
    cluster.drain()
    assert generate_statistics(cluster)["tokens_cached"] == 16
    assert_served(cluster, "first", "second")
    assert_holds_nothing(cluster)


def admissions(cluster: ModelCluster) -> list[str]:
    """Return a list to which each call of an admission policy in the generate stage is added."""
    seats: list[str] = []

    def watch(seat: str, ask: Ask) -> Ask:
        def called(view: Any) -> Any:
            seats.append(seat)
            return ask(view)

        return called if seat == "generate.admission" else ask

    cluster.kernel.watch_policies(watch)
    return seats


def test_gathering_is_called_on_arrival_and_at_its_deadline() -> None:
    """In between it waits for an event or its time, whatever the number of other steps."""
    policies = default_policies(generate_admission=Gathering(deadline_s=0.1))
    cluster = ModelCluster(make_limits(), policies)
    calls = admissions(cluster)
    cluster.submit(make_request("first", words(4), max_tokens=60))
    cluster.wait(200_000_000)
    assert len(calls) == 2, "on arrival and at the deadline"
    cluster.submit(make_request("second", words(4)))
    for _ in range(20):
        cluster.run_generate()
    assert len(calls) == 3, "the steps of the first request do not call it again"
    cluster.submit(make_request("third", words(4)))
    for _ in range(20):
        cluster.run_generate()
    assert len(calls) == 4
    cluster.wait(200_000_000)
    cluster.run_generate()
    assert len(calls) == 5, "one call for both"
    assert cluster.notices == []
    cluster.drain()
    assert joined(cluster) == ["first", "second", "third"]
    assert_served(cluster, *cluster.requests)


def test_gathering_encodes_what_comes_within_the_deadline_together() -> None:
    """Two images that arrive a moment apart are one batch, which does not wait once it is full."""
    policies = default_policies(encode_admission=Gathering(count=2))
    cluster = ModelCluster(make_limits(), policies)
    cluster.submit(image_request("a", (b"a", 10)))
    cluster.wait(50_000_000)
    assert cluster.encoded == []
    cluster.submit(image_request("b", (b"b", 10)))
    assert cluster.encoded == [[b"a", b"b"]]
    cluster.drain()


def test_fifo_is_not_called_again_before_something_changes() -> None:
    """A request without blocks is examined again when blocks were freed, not in every step."""
    policies = default_policies(generate_admission=Fifo())
    cluster = ModelCluster(make_limits(blocks=25, prefix_cache=False), policies)
    calls = admissions(cluster)
    cluster.submit(make_request("first", words(4), max_tokens=60))
    cluster.submit(make_request("second", words(96, start=100), max_tokens=2))
    cluster.run_generate()
    assert len(calls) == 2
    for _ in range(40):
        cluster.run_generate()
    assert len(calls) == 2
    assert_served(cluster, "first", "second")


@pytest.mark.parametrize("stage", ["encode_admission", "generate_admission"])
def test_priority_and_deadline_come_from_the_request(stage: str) -> None:
    """Both stages see the request's values; an image has the highest urgency of its requests."""

    def order(policy: RequestPolicy) -> list[str]:
        cluster = ModelCluster(
            make_limits(encode_items=1, slots=1), default_policies(**{stage: policy})
        )
        group = stage.removesuffix("_admission")
        cluster.lose(group)
        for name, priority, target_ms in [("a", 0, None), ("b", 1, 500), ("c", 2, 100)]:
            text, item = [7], (0, 4, name.encode())
            cluster.submit(
                make_request(name, text, [item], priority=priority, ttft_target_ms=target_ms)
            )
        item = (0, 4, b"a")
        cluster.submit(make_request("d", [8, 9], [item], priority=9, ttft_target_ms=1))
        while cluster.encode_log:
            cluster.run_encode()
        cluster.restore_group(group)
        assert_served(cluster, *cluster.requests)
        if stage == "encode_admission":
            return [key.decode() for batch in cluster.encoded for key in batch]
        return joined(cluster)

    expected = ["a", "c", "b"] if stage == "encode_admission" else ["d", "c", "b", "a"]
    assert order(Priority()) == expected


def encoded_after_first_chunk(policy: ChunkAware) -> list[bytes]:
    """Images encoded after one chunk of the request has been sent and not come back."""
    cluster = ModelCluster(make_limits(chunk_tokens=8, slots=1), default_policies(encoding=policy))
    text = words(40)
    items = [(8, 4, b"first"), (20, 4, b"second"), (40, 4, b"third")]
    cluster.submit(make_request("request", text, items))
    while cluster.encode_log:
        cluster.run_encode()
    found = [key for batch in cluster.encoded for key in batch]
    assert_served(cluster, "request")
    return found


def test_encoding_looks_as_far_ahead_as_configured() -> None:
    """The running chunk is text, and the kernel claims images of the next one meanwhile."""
    assert encoded_after_first_chunk(ChunkAware()) == [b"first"]
    assert encoded_after_first_chunk(ChunkAware(look_ahead_chunks=2)) == [b"first", b"second"]
    assert encoded_after_first_chunk(ChunkAware(look_ahead_chunks=9)) == [
        b"first",
        b"second",
        b"third",
    ]


def test_additional_image_of_a_conversation_costs_one_encode() -> None:
    cluster = ModelCluster(make_limits(prefix_cache=False))
    for turn in range(1, 5):
        items = [(0, 4, b"image%d" % number) for number in range(turn)]
        cluster.submit(make_request(f"turn{turn}", [7], items))
        cluster.drain()
        assert sum(len(batch) for batch in cluster.encoded) == turn


def test_scheduler_knows_no_architecture() -> None:
    """Neither the kernel nor a policy has a rule for a model family."""
    paths = [*(ROOT / "vsched/kernel").rglob("*.py"), *(ROOT / "policies").rglob("*.py")]
    found = [
        path.name
        for path in [*paths, *(ROOT / "vsched/policy").glob("*.py")]
        if re.search(r"qwen|llava|internvl|model_type|family", path.read_text(), re.IGNORECASE)
    ]
    assert not found
    assert len(paths) > 20
