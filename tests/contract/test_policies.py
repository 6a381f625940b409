"""One suite for every registered policy, and policies at work in the kernel: counters, look-ahead, number of calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.kernel.setups import (
    assert_served,
    generate_statistics,
    image_request,
    joined,
    make_cluster,
    words,
)
from vsched.plugins import RegisteredPolicy, list_policies, load_policy_class, resolve_policy
from vsched.policy import Admission, AdmissionView, Policy
from vsched.testing import check_policy, make_request
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


calls: list[int] = []


class CountedFifo(Fifo, frozen=True, kw_only=True):
    def admit(self, view: AdmissionView) -> Admission:
        calls.append(len(view.waiting))
        return super().admit(view)


def test_fifo_is_not_called_again_before_something_changes() -> None:
    """A request without blocks is examined again when blocks were freed, not in every step."""
    calls.clear()
    cluster = make_cluster(blocks=25, prefix_cache=False, generate_admission=CountedFifo())
    cluster.submit(make_request("first", words(4), max_tokens=60))
    cluster.submit(make_request("second", words(96, start=100), max_tokens=2))
    for _ in range(41):
        cluster.run_generate()
    assert len(calls) == 2
    assert_served(cluster, "first", "second")


@pytest.mark.parametrize("stage", ["encode_admission", "generate_admission"])
def test_priority_and_deadline_come_from_the_request(stage: str) -> None:
    """Both stages see the request's values; an image has the highest urgency of its requests."""
    cluster = make_cluster(encode_items=1, slots=1, **{stage: Priority()})
    group = stage.removesuffix("_admission")
    cluster.lose(group)
    for name, priority, target_ms in [("a", 0, None), ("b", 1, 500), ("c", 2, 100)]:
        urgency = {"priority": priority, "ttft_target_ms": target_ms}
        cluster.submit(image_request(name, (name.encode(), 4), **urgency))
    cluster.submit(image_request("d", (b"a", 4), priority=9, ttft_target_ms=1))
    while cluster.encode_logs["encode"]:
        cluster.run_encode()
    cluster.restore_group(group)
    assert_served(cluster, *cluster.requests)
    if stage == "encode_admission":
        assert [key.decode() for batch in cluster.encoded for key in batch] == ["a", "c", "b"]
    else:
        assert joined(cluster) == ["d", "c", "b", "a"]


@pytest.mark.parametrize(("look_ahead", "count"), [(0, 1), (2, 2), (9, 3)])
def test_encoding_looks_as_far_ahead_as_configured(look_ahead: int, count: int) -> None:
    """The running chunk is text, and the kernel claims images of the next ones meanwhile."""
    policy = ChunkAware(look_ahead_chunks=look_ahead)
    cluster = make_cluster(chunk_tokens=8, slots=1, encoding=policy)
    images = [b"first", b"second", b"third"]
    items = [(offset, 4, key) for offset, key in zip((8, 20, 40), images, strict=True)]
    cluster.submit(make_request("request", words(40), items))
    while cluster.encode_logs["encode"]:
        cluster.run_encode()
    assert [key for batch in cluster.encoded for key in batch] == images[:count]
    assert_served(cluster, "request")


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
