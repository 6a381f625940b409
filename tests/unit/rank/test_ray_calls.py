"""The calls of Ray, made to Ray itself: one small node. `make ray` installs it; these are skipped without."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patience import PATIENCE_S, patience
from vsched.aio.hosts.ray_hosts import NAMESPACE, InstalledRay
from vsched.errors import ConfigError, VschedError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # else other programs cost an actor
ray: Any = pytest.importorskip("ray", reason="needs the extra `ray`")

pytestmark = [
    pytest.mark.timeout(3 * PATIENCE_S),
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.slow,
]
BUNDLE = {"CPU": 1.0, "encoders": 1.0}
SECRET = b"s" * 32


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """Yield the address of a node that is a cluster."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "resources": {"encoders": 2},
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
        },
    )
    yield str(cluster.address)
    cluster.shutdown()


@pytest.fixture
def calls(head: str) -> Iterator[InstalledRay]:
    """Yield connected calls, and leave the cluster afterwards."""
    calls = InstalledRay()
    calls.connect(head, PATIENCE_S)
    yield calls
    if ray.is_initialized():
        calls.close([], None)


async def check_listened_to(address: str) -> None:
    """Fail unless the address accepts connections."""
    ip, _, port = address.removeprefix("tcp://").rpartition(":")
    async with patience():
        _, writer = await asyncio.open_connection(ip, int(port))
    writer.close()


async def another_address(calls: InstalledRay, actor: Any, before: str) -> str:
    """Return the address of an actor once it has changed."""
    while True:
        now = await calls.address_of(actor)
        if now != before:
            return now


async def ask_for_ever(calls: InstalledRay, actor: Any) -> None:
    """Look an actor up until that fails."""
    while True:
        await calls.address_of(actor)


async def test_calls_start_a_host_that_is_listened_to_until_all_is_given_back(
    calls: InstalledRay,
) -> None:
    """It gets all resources of its bundle, which are free again at the end."""
    free = ray.available_resources()["encoders"]
    group = calls.make_group([BUNDLE], "strict-pack")
    actor = calls.start_host(group, 0, BUNDLE, SECRET, 1)
    async with patience():
        address = await calls.address_of(actor)
    await check_listened_to(address)
    assert ray.available_resources().get("encoders", 0.0) == free - 1
    calls.close([actor], group)
    assert not ray.is_initialized(), "it was entered here"
    ip, _, port = address.removeprefix("tcp://").rpartition(":")
    with pytest.raises(OSError, match="refused|Connect call failed"):
        await asyncio.open_connection(ip, int(port))


async def test_calls_report_restarted_and_lost_actors(calls: InstalledRay) -> None:
    group = calls.make_group([BUNDLE], "pack")
    actor = calls.start_host(group, 0, BUNDLE, SECRET, 1)
    async with patience():
        before = await calls.address_of(actor)
        ray.kill(actor, no_restart=False)
        now = await another_address(calls, actor, before)
    await check_listened_to(now)
    ray.kill(actor)
    async with patience():
        with pytest.raises(VschedError):
            await ask_for_ever(calls, actor)
    calls.close([], group)


def test_calls_find_a_group_by_its_name(calls: InstalledRay) -> None:
    made = ray.util.placement_group([BUNDLE, {"CPU": 1.0}], name="mine", lifetime="detached")
    try:
        group, bundles = calls.find_group("mine")
        assert group.id == made.id
        assert [dict(bundle) for bundle in bundles] == [BUNDLE, {"CPU": 1.0}]
        with pytest.raises(ConfigError, match=f"no placement group 'another' .*{NAMESPACE!r}"):
            calls.find_group("another")
    finally:
        ray.util.remove_placement_group(made)
