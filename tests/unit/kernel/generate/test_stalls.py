"""Stalls: a prefill in a slot waits for an embedding whose pages belong to an older, waiting request."""

from __future__ import annotations

from tests.unit.kernel.policy_pool import Reversed
from tests.unit.kernel.setups import (
    assert_holds_nothing,
    assert_served,
    generate_statistics,
    joined,
    make_limits,
    words,
)
from vsched.kernel import SchedulerLimits
from vsched.probes import observed
from vsched.testing import ModelCluster, default_policies, make_request


def stalling(limits: SchedulerLimits, *, prefills: int) -> ModelCluster:
    """A cluster whose next event stalls: an image takes all pages, and its request waits behind prefills.

    The oldest request waited for its image; younger ones joined with text, and wait for images behind it.
    """
    cluster = ModelCluster(limits, default_policies(generate_admission=Reversed()))
    cluster.submit(make_request("front", [7], [(0, 16, b"f")], max_tokens=2))
    for index in range(prefills):
        items = [(8, 16, b"p%d" % index)]
        prompt = words(9, start=40 * (index + 1))
        cluster.submit(make_request(f"p{index}", prompt, items, max_tokens=2))
    return cluster


def finish_prefills(cluster: ModelCluster) -> None:
    """Run the chunks of text, then encode the first image."""
    while cluster.busy("generate"):
        cluster.run_generate()
    cluster.run_encode()


def test_youngest_stalled_prefill_gives_way_to_the_front() -> None:
    """The older prefill keeps its slot and its computed tokens."""
    limits = make_limits(blocks=16, pages=4, chunk_tokens=8, prefix_cache=False)
    cluster = stalling(limits, prefills=2)
    with observed() as reached:
        finish_prefills(cluster)
    assert reached["generate.stalled_prefill_preempted"] == 1
    assert joined(cluster)[-1] == "front", "it joins at once: no other event would come"
    cluster.drain()
    order = joined(cluster)
    assert sorted(order[:2]) == ["p0", "p1"]
    assert order[2:] == ["front", "p1"]
    assert_served(cluster, "front", "p0", "p1")
    assert_holds_nothing(cluster)


def test_front_that_fits_joins_before_any_prefill_gives_way() -> None:
    """The policy chose a request that did not fit; the front was not tried after it."""
    limits = make_limits(blocks=16, pages=4, chunk_tokens=8, prefix_cache=False)
    cluster = stalling(limits, prefills=1)
    while cluster.busy("generate"):
        cluster.run_generate()
    cluster.submit(make_request("large", words(45, start=500), max_tokens=2))
    with observed() as reached:
        cluster.run_encode()
    assert reached["kernel.stall_favoured"] == 1
    assert generate_statistics(cluster)["preemptions"] == 0
    cluster.drain()
    assert joined(cluster) == ["p0", "front", "large"]
    assert generate_statistics(cluster)["preemptions"] == 0
    assert_served(cluster, "front", "p0", "large")
