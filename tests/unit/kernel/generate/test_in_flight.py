"""Steps in flight while their requests change state."""

from __future__ import annotations

import pytest

from tests.unit.kernel.setups import (
    assert_holds_nothing,
    assert_served,
    generate_statistics,
    image_request,
    make_limits,
    words,
)
from vsched.kernel.events import Cleared
from vsched.probes import observed
from vsched.testing import ModelCluster, make_request

NAMES = ("r0", "r1", "r2", "r3")


def settling() -> ModelCluster:
    """A cluster with a preempted request whose last step is in flight."""
    limits = make_limits(blocks=10, slots=4, generate_depth=2)
    cluster = ModelCluster(limits)
    for index, name in enumerate(NAMES):
        cluster.submit(make_request(name, words(6, start=50 * index), max_tokens=20))
    while not generate_statistics(cluster)["preempted"]:
        cluster.run_generate()
    return cluster


def test_group_lost_while_a_preempted_request_settles_loses_no_request() -> None:
    cluster = settling()
    with observed() as reached:
        cluster.lose("generate")
    assert reached["generate.lost_while_settling"]
    cluster.restore_group("generate")
    assert_served(cluster, *NAMES)
    assert_holds_nothing(cluster)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_request_may_end_while_it_settles(all_of_them: bool) -> None:
    cluster = settling()
    settling_now = [name for name in NAMES if "its last step" in cluster.kernel.explain(name)]
    with observed() as reached:
        if all_of_them:
            cluster.send(Cleared())
        else:
            cluster.abort(settling_now[0])
    assert reached["generate.settling_ended"]
    cluster.drain()
    others = [name for name in NAMES if name not in settling_now[:1] and not all_of_them]
    assert_served(cluster, *others)
    assert_holds_nothing(cluster)


def test_request_that_waits_for_its_lost_group_claims_no_embedding() -> None:
    """As an older request, it would keep embeddings from requests that can go on elsewhere."""
    limits = make_limits(generators=2, chunk_tokens=4, batch_tokens=8)
    cluster = ModelCluster(limits)
    cluster.submit(image_request("r", (b"first", 12), (b"second", 12)))
    while not generate_statistics(cluster)["prefilling"]:
        cluster.run_encode()
    group = cluster.busy("generate")[0]
    assert any(entry.claims for entry in cluster.kernel.embeddings)
    cluster.lose(group)
    assert "come back" in cluster.kernel.explain("r")
    assert not any(entry.claims for entry in cluster.kernel.embeddings)
    cluster.restore_group(group)
    assert_served(cluster, "r")


def test_tokens_are_kept_of_the_steps_that_a_running_request_took_part_in() -> None:
    """Preempted prefills, which have none, keep nothing."""
    cluster = ModelCluster(make_limits(blocks=10, chunk_tokens=16, prefix_cache=False))
    group = cluster.kernel.generators[0]
    cluster.submit(make_request("short", words(2, start=90), max_tokens=6))
    cluster.submit(make_request("old", words(2), max_tokens=30))
    while "short" not in cluster.ended:
        cluster.run_generate()
    steps = group._in_flight
    assert steps._log.first_step + len(steps._log.batches) == steps.done + 1
    assert len(steps._log.batches) <= len(cluster.outputs["old"])
    cluster.submit(make_request("young", words(36, start=50), max_tokens=2))
    cluster.drain()
    assert len(steps._log.batches) <= 1, "of the last step, after which nothing ended"
    assert_served(cluster, "short", "old", "young")
