"""An engine whose hosts end, freeze or are cut off, and the time of bytes on the way there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.sim.planted import PLANTS, planted
from tests.sim.test_faults import requests
from vsched.config.sections import ClusterConfig
from vsched.errors import ConfigError
from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.faults import (
    HOST_KINDS,
    AnyFault,
    FaultPlan,
    HostCrash,
    HostCut,
    HostStall,
    SlowHostLink,
)
from vsched.sim.invariants import SimulationFailed
from vsched.sim.network.links import HostLinkProfile
from vsched.sim.workload.requests import Arrival, Image, Text

Engines = Callable[..., SimEngine]
SECOND_NS = 1_000_000_000
HOSTS = {"far": "tcp://10.0.0.2:7700", "farther": "tcp://10.0.0.3:7700"}
pytestmark = pytest.mark.filterwarnings("ignore")


def cluster(encode: Sequence[str] = ("far",), generate: Sequence[str] = ("far",)) -> ClusterConfig:
    """Return hosts, and the stages that run there."""
    return ClusterConfig(
        hosts=HOSTS, key_file="simulated", encode=[*encode], generate=[*generate], connect_s=1.0
    )


async def strike(sim_engine: Engines, *faults: AnyFault, **hosts: Sequence[str]) -> list[str]:
    """Run requests past faults of hosts; all end well. Return the lost groups, with reasons."""
    plan = FaultPlan(faults=faults)
    async with sim_engine(small_config(cluster=cluster(**hosts)), faults=plan) as engine:
        sessions = await engine.run(requests())
        await engine.heal()
    assert {one.outcome for one in sessions} == {"finished"}
    assert {type(one.fault) for one in engine.world.injector.struck} == {type(f) for f in faults}
    return [f"{loss.group}: {loss.reason}" for loss in engine.observer.losses]  # type: ignore[union-attr]


@pytest.mark.sim
async def test_lost_host_takes_all_its_groups_at_once(sim_engine: Engines) -> None:
    crash = HostCrash(at_ns=SECOND_NS, duration_ns=SECOND_NS, host="far")
    lost = await strike(sim_engine, crash)
    assert len(lost) == 2
    assert all("host far closed the connection" in one for one in lost)


@pytest.mark.sim
async def test_power_failure_is_noticed_by_silence(sim_engine: Engines) -> None:
    crash = HostCrash(at_ns=SECOND_NS, duration_ns=9 * SECOND_NS, host="far", mode="powered_off")
    lost = await strike(sim_engine, crash, encode=["local"], generate=["far", "farther"])
    assert len(lost) == 1
    assert "silent" in lost[0]


@pytest.mark.sim
@pytest.mark.parametrize("kind", [HostCut, HostStall])
async def test_short_standstill_costs_no_group(sim_engine: Engines, kind: type[Any]) -> None:
    """Messages in flight arrive afterwards, in order."""
    fault = kind(at_ns=SECOND_NS, duration_ns=SECOND_NS, host="far")
    assert not await strike(sim_engine, fault)


@pytest.mark.sim
@pytest.mark.parametrize("kind", [HostCut, HostStall])
async def test_long_standstill_costs_the_groups_there(sim_engine: Engines, kind: type[Any]) -> None:
    fault = kind(at_ns=SECOND_NS, duration_ns=6 * SECOND_NS, host="far")
    lost = await strike(sim_engine, fault, generate=["farther"])
    assert [one.partition(":")[0] for one in lost] == ["encode"]


@pytest.mark.sim
async def test_slow_link_costs_time_alone(sim_engine: Engines) -> None:
    slow = SlowHostLink(at_ns=SECOND_NS, duration_ns=SECOND_NS, host="far", factor=100.0)
    assert not await strike(sim_engine, slow)


async def first_token_ns(sim_engine: Engines, links: HostLinkProfile, image: int) -> int:
    """Time from the arrival of a request with an image to its end."""
    config = small_config(cluster=cluster(["far"], ["farther"]))
    arrival = Arrival(
        at_ns=0,
        request_id="r",
        prompt=(Text(1, 4), Image("image", image), Text(2, 4)),
        output_tokens=1,
    )
    async with sim_engine(config, host_links=links) as engine:
        (session,) = await engine.run([arrival])
        await session.done.wait()
        taken_ns = engine.world.loop.now_ns() - engine.world.origin_ns
        await engine.heal()
    return taken_ns


@pytest.mark.sim
async def test_pixels_and_rows_take_their_time_on_links(sim_engine: Engines) -> None:
    """The delay follows from the bandwidth, and from the latency if the window is small."""
    quick = HostLinkProfile(bytes_per_s=1e9)
    slow = HostLinkProfile(bytes_per_s=100e3)
    narrow = HostLinkProfile(bytes_per_s=100e3, latency_ns=20_000_000, window_bytes=256)
    taken = [await first_token_ns(sim_engine, links, 40) for links in (quick, slow, narrow)]
    assert taken[0] + 10_000_000 < taken[1], "bytes take time"
    assert taken[1] + 200_000_000 < taken[2], "a small window with a long latency takes more"


@pytest.mark.sim
async def test_unknown_host_is_refused(sim_engine: Engines) -> None:
    plan = FaultPlan(faults=(HostStall(at_ns=0, duration_ns=1, host="nowhere"),))
    with pytest.raises(ConfigError, match=r"nowhere: no such host.*far, farther"):
        sim_engine(small_config(cluster=cluster()), faults=plan)


def test_every_kind_of_host_fault_is_tried() -> None:
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    for kind in HOST_KINDS:
        assert text.count(kind.__name__) > 1, f"{kind.__name__} is not tried"


UNSEEN = next(one for one in PLANTS if one.name == "a broken connection that nobody looks at")


@pytest.mark.sim
async def test_broken_idle_connection_goes_unnoticed_without_a_crash(
    sim_engine: Engines,
) -> None:
    slow = SlowHostLink(at_ns=SECOND_NS, duration_ns=SECOND_NS, host="far")
    with planted(UNSEEN):
        assert not await strike(sim_engine, slow)


@pytest.mark.sim
async def test_broken_idle_connection_is_found_by_a_crash(
    sim_engine: Engines,
) -> None:
    """Silence would be detected, too, but much later."""
    crash = HostCrash(at_ns=SECOND_NS, duration_ns=SECOND_NS, host="far")
    with planted(UNSEEN), pytest.raises(SimulationFailed, match="not lost in time with its host"):
        await strike(sim_engine, crash)
