"""Links to other hosts in the fast simulator: a rate, and a latency in each direction."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from tests.unit.sim.shapes import COST, SCARCE, TINY, arrival, config, scarce
from vsched.sim import (
    FaultPlan,
    GroupOutage,
    HostLinkProfile,
    Image,
    SimulationOutcome,
    Text,
    simulate,
    workload_of,
)
from vsched.sim.fast.groups import LinkWay, hosts_of

MS = 1_000_000
LINK = HostLinkProfile(latency_ns=3 * MS, bytes_per_s=1e6)
HOSTS = 'cluster.hosts={far="tcp://10.0.0.2:7700", farther="tcp://10.0.0.3:7700"}'
CLUSTER = (HOSTS, "cluster.key_file=any")
PIXEL_BYTES, ROW_BYTES = COST.bytes_per_token, TINY.embedding_row_bytes


def run(*sets: str, images: Sequence[int] = (100,), together: bool = False) -> SimulationOutcome:
    """Simulate requests with an image each, one after another or all at once, over links."""
    arrivals = [
        arrival(index, 0 if together else 1000 * index, Text(index, 4), Image(f"i{index}", tokens))
        for index, tokens in enumerate(images)
    ]
    served = config("placement=separate", *CLUSTER, *sets)
    load = workload_of("images", arrivals)
    return simulate(served, load, cost=COST, host_links=LINK, oracles=True)


def added_ms(outcome: SimulationOutcome) -> float:
    """Time that links add to the mean time to the first token."""
    return outcome.figures.ttft_ms.mean - run().figures.ttft_ms.mean


def milliseconds(size: int) -> float:
    return size / LINK.bytes_per_s * 1e3


def test_encoder_on_another_host_adds_pixels_there_and_rows_back() -> None:
    outcome = run('cluster.encode=["far"]')
    size = 100 * (PIXEL_BYTES + ROW_BYTES)
    assert outcome.figures.link_bytes == size
    assert added_ms(outcome) == pytest.approx(2 * 3 + milliseconds(size), abs=0.01)
    assert run().figures.link_bytes == 0


def test_generator_on_another_host_adds_rows_there() -> None:
    outcome = run('cluster.generate=["far"]')
    # Later steps begin while the result of the first is in flight, so nothing else is added to its time.
    assert outcome.figures.link_bytes == 100 * ROW_BYTES
    assert added_ms(outcome) == pytest.approx(2 * 3 + milliseconds(100 * ROW_BYTES), abs=0.01)


def test_both_stages_in_one_process_need_pixels_alone() -> None:
    far = ("placement=together", 'cluster.generate=["far"]')
    assert run(*far).figures.link_bytes == 100 * PIXEL_BYTES


def test_rows_between_two_hosts_pass_through_the_engine() -> None:
    outcome = run('cluster.encode=["far"]', 'cluster.generate=["farther"]')
    assert outcome.figures.link_bytes == 100 * (PIXEL_BYTES + 2 * ROW_BYTES)


def test_groups_of_one_host_share_its_link() -> None:
    images = (500, 500)
    apart = run(
        "encode.replicas=2", 'cluster.encode=["far", "farther"]', images=images, together=True
    )
    shared = run("encode.replicas=2", 'cluster.encode=["far"]', images=images, together=True)
    waits_ms = milliseconds(500 * PIXEL_BYTES)
    # On separate links, the two meet at the generator instead, which takes some of the time.
    later_ms = shared.figures.ttft_ms.p99 - apart.figures.ttft_ms.p99
    assert 0.8 * waits_ms < later_ms < waits_ms
    assert shared.figures.link_busy > apart.figures.link_busy


@pytest.mark.parametrize("at_ms", range(30, 60, 6))
def test_result_of_a_lost_group_is_not_heard(at_ms: int) -> None:
    """Outages while results are in flight: every request ends, and the checks of the scheduler hold."""
    served = config(
        *SCARCE,
        *CLUSTER,
        "placement=separate",
        'cluster.encode=["far"]',
        'cluster.generate=["farther"]',
    )
    outages = [
        GroupOutage(at_ns=at_ms * MS, duration_ns=15 * MS, group=group)
        for at_ms, group in ((at_ms, "encode"), (at_ms + 150, "generate"))
    ]
    plan = FaultPlan(faults=tuple(outages))
    outcome = simulate(
        served, scarce(1), cost=COST, host_links=LINK, faults=plan, oracles=True, check_every=1
    )
    assert outcome.figures.finished == outcome.figures.requests == 40


def test_way_waits_for_windows_if_the_latency_is_long() -> None:
    profile = HostLinkProfile(latency_ns=50 * MS, bytes_per_s=1e6, window_bytes=10_000)
    long = LinkWay(profile, Random(0))
    # A window takes 10 ms; then nothing leaves until its acknowledgement is back, 100 ms after its first byte.
    assert long.arrival_ns(10_000, 0) == 60 * MS
    assert long.arrival_ns(30_000, 1000 * MS) == (1000 + 30 + 2 * 90 + 50) * MS


@pytest.mark.parametrize("said", [(), ('cluster.generate=["ray"]',)], ids=["by default", "by name"])
def test_replicas_that_ray_places_have_a_link_each(said: tuple[str, ...]) -> None:
    sets = ('cluster.ray="auto"', 'cluster.encode=["local"]', *said, "placement=separate")
    served = config(*sets).config
    hosts = hosts_of(served, ["encode-0"], ["generate-0", "generate-1"])
    assert hosts == {
        "encode-0": "local",
        "generate-0": "ray-generate-0",
        "generate-1": "ray-generate-1",
    }
