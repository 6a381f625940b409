"""A generate group that comes back with fewer KV blocks than before, since memory ran out."""

from __future__ import annotations

from tests.unit.kernel.setups import assert_served, make_limits, words
from vsched.kernel import Scheduler
from vsched.policy_host.snapshot import encode_snapshot, restore_snapshot
from vsched.testing import ModelCluster, make_request
from vsched.testing.cluster import default_policies

LIMITS = make_limits(blocks=40, context_tokens=64, generators=2)


def blocks_of(kernel: Scheduler) -> list[int]:
    groups = kernel.statistics()["generate"]["groups"]
    return [groups[name]["blocks_total"] for name in ("generate-0", "generate-1")]


def test_group_serves_all_its_requests_with_fewer_blocks_until_it_comes_back_with_all() -> None:
    """The largest request still fits; the next loss may give all blocks back."""
    cluster = ModelCluster(LIMITS, default_policies())
    names = [f"r{number}" for number in range(8)]
    for number, name in enumerate(names):
        cluster.submit(make_request(name, words(40, start=100 * number), max_tokens=24))
    cluster.run_generate()
    cluster.lose("generate-1")
    assert LIMITS.blocks_min < LIMITS.blocks
    cluster.restore_group("generate-1", LIMITS.blocks_min)
    assert blocks_of(cluster.kernel) == [LIMITS.blocks, LIMITS.blocks_min]
    state = encode_snapshot(cluster.kernel)
    restored = restore_snapshot(Scheduler(LIMITS, default_policies()), state)
    assert blocks_of(restored) == [LIMITS.blocks, LIMITS.blocks_min]
    assert_served(cluster, *names)
    cluster.lose("generate-1")
    cluster.restore_group("generate-1")
    assert blocks_of(cluster.kernel) == [LIMITS.blocks] * 2
