"""The insertion policy decides which blocks of a finished request stay in the prefix cache."""

from __future__ import annotations

from typing import Any

from tests.unit.kernel.setups import (
    answering,
    assert_served,
    generate_statistics,
    make_limits,
    words,
)
from vsched.policy import InsertionView
from vsched.testing import ModelCluster, default_policies, make_request

VIEWS: list[InsertionView] = []


def serve(cluster: ModelCluster, name: str, tokens: int, *, start: int = 10) -> int:
    """Serve a request; return the number of cached prompt tokens."""
    cluster.submit(make_request(name, words(tokens, start=start), max_tokens=6))
    assert_served(cluster, name)
    return cluster.ended[name].times.cached_tokens


def cluster_with(kept: int, **limits: Any) -> ModelCluster:
    """A cluster whose insertion policy keeps this number of blocks, and records its views."""
    VIEWS.clear()
    policy = answering("insertion", kept, VIEWS)
    return ModelCluster(make_limits(**limits), default_policies(insertion=policy))


def test_insertion_policy_says_how_many_blocks_stay() -> None:
    """Blocks hold four tokens; of 12 + 5 tokens, four blocks are full."""
    cluster = cluster_with(2)
    assert serve(cluster, "a", 12) == 0
    (view,) = VIEWS
    assert (len(view.hashes), view.prompt_blocks, view.found, view.block_tokens) == (4, 3, 0, 4)
    assert (view.prompt_tokens, view.output_tokens) == (12, 6)
    assert generate_statistics(cluster)["blocks_cached"] == 2
    assert serve(cluster, "b", 12) == 8


def test_cached_blocks_of_a_request_stay() -> None:
    cluster = cluster_with(3)
    serve(cluster, "a", 12)
    assert serve(cluster, "b", 13) == 12
    assert [view.found for view in VIEWS] == [0, 3]
    assert generate_statistics(cluster)["blocks_cached"] == 3


def test_insertion_policy_is_not_called_without_blocks() -> None:
    """A request of less than a block, and one without a prefix cache."""
    cluster = cluster_with(0)
    cluster.submit(make_request("short", [1], max_tokens=2))
    cluster.drain()
    assert not VIEWS
    cluster = cluster_with(0, prefix_cache=False)
    serve(cluster, "a", 12)
    assert not VIEWS


def test_blocks_that_others_use_stay_until_they_end() -> None:
    """Blocks that are not kept can still be shared while the first request is there."""
    cluster = cluster_with(0)
    cluster.submit(make_request("long", words(12), max_tokens=40))
    cluster.run_generate()
    cluster.submit(make_request("short", words(13), max_tokens=1))
    assert_served(cluster, "long", "short")
    assert cluster.ended["short"].times.cached_tokens == 12
    assert generate_statistics(cluster)["blocks_cached"] == 0


def test_preempted_request_finds_what_it_computed() -> None:
    """That is recomputation, not caching: the policy is called at the end."""
    cluster = cluster_with(0, blocks=12, slots=2)
    for name, start in (("a", 10), ("b", 60)):
        cluster.submit(make_request(name, words(12, start=start), max_tokens=24))
    assert_served(cluster, "a", "b")
    assert generate_statistics(cluster)["preemptions"] > 0
    assert generate_statistics(cluster)["tokens_cached"] > 0
    assert len(VIEWS) == 2
    assert generate_statistics(cluster)["blocks_cached"] == 0
