"""An engine whose hosts end, freeze or are cut off, and the time of bytes on the way there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.sim.test_faults import requests
from vsched.config.sections import ClusterConfig
from vsched.errors import ConfigError
from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.faults import AnyFault, FaultPlan, HostCrash, HostCut, HostStall, SlowHostLink
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


CRASH = HostCrash(at_ns=SECOND_NS, duration_ns=SECOND_NS, host="far")
POWER_FAILURE = HostCrash(
    at_ns=SECOND_NS, duration_ns=9 * SECOND_NS, host="far", mode="powered_off"
)
TWO_GENERATORS = {"encode": ["local"], "generate": ["far", "farther"]}
SLOW = SlowHostLink(at_ns=SECOND_NS, duration_ns=SECOND_NS, host="far", factor=100.0)


def standstills(seconds: int) -> list[AnyFault]:
    times = {"at_ns": SECOND_NS, "duration_ns": seconds * SECOND_NS}
    return [HostCut(**times, host="far"), HostStall(**times, host="far")]


@pytest.mark.sim
@pytest.mark.parametrize(
    ("fault", "hosts", "lost", "reason"),
    [
        (CRASH, {}, ["encode", "generate"], "host far closed the connection"),
        (POWER_FAILURE, TWO_GENERATORS, ["generate"], "silent"),
        # Messages in flight arrive after a short standstill, in order.
        *((fault, {}, [], "") for fault in (*standstills(1), SLOW)),
        *((fault, {"generate": ["farther"]}, ["encode"], "") for fault in standstills(6)),
    ],
    ids=["crash", "power failure", "short cut", "short stall", "slow", "long cut", "long stall"],
)
async def test_fault_of_a_host_costs_its_groups_or_time(
    sim_engine: Engines,
    fault: AnyFault,
    hosts: dict[str, Sequence[str]],
    lost: list[str],
    reason: str,
) -> None:
    """A crash is noticed at once, a power failure by silence."""
    plan = FaultPlan(faults=(fault,))
    async with sim_engine(small_config(cluster=cluster(**hosts)), faults=plan) as engine:
        sessions = await engine.run(requests())
        await engine.heal()
    assert {one.outcome for one in sessions} == {"finished"}
    assert [type(one.fault) for one in engine.world.injector.struck] == [type(fault)]
    assert engine.observer is not None
    assert sorted(loss.group for loss in engine.observer.losses) == lost
    assert all(reason in loss.reason for loss in engine.observer.losses)


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
