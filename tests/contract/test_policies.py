"""One suite for every registered policy, and policies at work in the kernel: counters, look-ahead, number of calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.kernel.setups import assert_served, generate_statistics, joined, make_cluster, words
from vsched.plugins import RegisteredPolicy, list_policies, load_policy_class, resolve_policy
from vsched.policy import Policy, RequestPolicy
from vsched.policy_host.seats import Ask
from vsched.testing import ModelCluster, check_policy, make_request
from vsched_policies.admission import Fifo, Priority
from vsched_policies.encoding import ChunkAware

ROOT = Path(__file__).parents[2]
REGISTERED = list_policies()
FIELDS: dict[str, dict[str, Any]] = {"pinned": {"tokens": 64}}


def test_request_that_waits_for_blocks_holds_none_not_even_its_cached_prefix() -> None:
    """Nothing is allocated for a request, not even shared blocks, before everything it needs is available."""
    cluster = make_cluster(make_request("first", words(20), max_tokens=4), blocks=9, slots=3)
    before = generate_statistics(cluster)
    cluster.submit(make_request("second", [*words(16), *words(17, start=90)], max_tokens=3))
    after = generate_statistics(cluster)
    assert after == {**before, "waiting": 1, "load_tokens": before["load_tokens"] + 33}
    assert_served(cluster, "first", "second")
    assert generate_statistics(cluster)["tokens_cached"] == 16


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


def test_fifo_is_not_called_again_before_something_changes() -> None:
    """A request without blocks is examined again when blocks were freed, not in every step."""
    cluster = make_cluster(blocks=25, prefix_cache=False, generate_admission=Fifo())
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
        cluster = make_cluster(encode_items=1, slots=1, **{stage: policy})
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
    cluster = make_cluster(chunk_tokens=8, slots=1, encoding=policy)
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


def test_scheduler_knows_no_architecture() -> None:
    paths = [*(ROOT / "vsched/kernel").rglob("*.py"), *(ROOT / "policies").rglob("*.py")]
    found = [
        path.name
        for path in [*paths, *(ROOT / "vsched/policy").glob("*.py")]
        if re.search(r"qwen|llava|internvl|model_type|family", path.read_text(), re.IGNORECASE)
    ]
    assert not found
    assert len(paths) > 20


def make(policy: RegisteredPolicy) -> Policy:
    return resolve_policy(policy.kind, {"use": policy.name, **FIELDS.get(policy.name, {})})


LEARNING = ("draft-model", "prompt-lookup", "shortest-first", "slo-feedback")
"""Policies with a state, whose growth is measured in a long run; `tenant-fair` stands for them in `make test`."""


@pytest.mark.parametrize(
    "registered",
    [
        pytest.param(one, marks=[pytest.mark.thorough] if one.name in LEARNING else [])
        for one in REGISTERED
    ],
    ids=lambda policy: f"{policy.kind}-{policy.name}",
)
def test_policy_meets_its_contract(registered: RegisteredPolicy) -> None:
    """In a random schedule of 80 events, too: all is returned, and the same run repeats exactly."""
    assert registered.error is None
    assert registered.summary
    assert registered.summary.endswith(".")
    policy = make(registered)
    assert type(policy) is load_policy_class(registered.kind, registered.name)
    values = msgspec.to_builtins(policy)
    assert msgspec.convert(values, type(policy)) == policy, "fields are its whole state"
    check_policy(policy, seeds=range(1))
