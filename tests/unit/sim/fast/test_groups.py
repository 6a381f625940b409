"""Groups of the fast simulator: links to other hosts, contention for cores, and outages."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from tests.unit.sim.shapes import COST, SCARCE, TINY, arrival, config, scarce
from vsched.errors import ConfigError
from vsched.sim import HostLinkProfile, SimulationOutcome
from vsched.sim.cost.model import CostModel, HostCost
from vsched.sim.fast.groups import (
    Contention,
    GroupOutage,
    LinkWay,
    SharedWork,
    hosts_of,
)
from vsched.sim.fast.simulation import simulate
from vsched.sim.workload.requests import Image, Text, workload_of

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
    outcome = simulate(
        served, scarce(1), cost=COST, host_links=LINK, outages=outages, oracles=True, check_every=1
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


class Doing:
    def __init__(self, process: str = "") -> None:
        self.incarnation = 0
        self._process = process

    @property
    def process(self) -> object:
        return self._process or self


class Announced:
    """The latest announced end of each, as the heap of a simulation would keep it."""

    def __init__(self, *contention: float) -> None:
        self.ends: dict[SharedWork, tuple[int, int]] = {}
        self.contention = Contention(contention, self.announce)

    def announce(self, work: SharedWork, end_ns: int) -> None:
        self.ends[work] = (end_ns, work.incarnation)

    def end(self, work: SharedWork) -> int:
        end_ns, incarnation = self.ends[work]
        assert incarnation == work.incarnation, (
            "an end that is not valid any more was announced last"
        )
        return end_ns


def test_contention_of_one_takes_its_time() -> None:
    announced, one = Announced(1.0, 2.0), Doing()
    announced.contention.enter(one, 100, 1000)
    assert announced.end(one) == 1100


def test_contention_slows_work_down_while_there_is_company() -> None:
    announced, one, other = Announced(1.0, 2.0), Doing(), Doing()
    announced.contention.enter(one, 100, 0)
    announced.contention.enter(other, 30, 40)
    assert announced.end(one) == 40 + 60 * 2
    assert announced.end(other) == 40 + 30 * 2
    announced.contention.leave(other, 100)
    assert announced.end(one) == 100 + 30  # 40 were done alone, and 30 in company
    assert one.incarnation == 3


def test_contention_larger_than_known_shares_equally() -> None:
    announced, several = Announced(1.0, 1.5), [Doing() for _ in range(4)]
    for one in several:
        announced.contention.enter(one, 100, 0)
    assert {announced.end(one) for one in several} == {300}


def test_contention_of_threads_is_one_process() -> None:
    announced, several = Announced(1.0, 3.0), [Doing("engine"), Doing("engine"), Doing("rank")]
    for one in several[:2]:
        announced.contention.enter(one, 100, 0)
    assert announced.end(several[0]) == 100
    announced.contention.enter(several[2], 100, 0)
    assert {announced.end(one) for one in several} == {300}
    announced.contention.leave(several[0], 300)
    announced.contention.leave(several[1], 300)
    assert several[2].incarnation == 2


def test_contention_announces_only_changes() -> None:
    announced, one, other = Announced(1.0, 1.0), Doing(), Doing()
    announced.contention.enter(one, 100, 0)
    announced.contention.enter(other, 100, 50)
    assert one.incarnation == 1
    announced.contention.leave(one, 100)
    announced.contention.leave(one, 100)  # it is gone already
    assert announced.end(other) == 150


def slowed_down(*contention: float) -> CostModel:
    host: HostCost = msgspec.structs.replace(COST.host, contention=contention)
    return msgspec.structs.replace(COST, host=host)


def test_simulation_without_contention_is_the_same() -> None:
    plain = simulate(config(*SCARCE), scarce(1), cost=COST)
    alike = simulate(config(*SCARCE), scarce(1), cost=slowed_down(1.0, 1.0, 1.0, 1.0))
    assert alike.digest == plain.digest


@pytest.mark.parametrize("placement", ["separate", "together"])
def test_simulation_with_contention_takes_longer_and_repeats(placement: str) -> None:
    settings = config(*SCARCE, f"placement={placement}")
    slow, again = (
        simulate(settings, scarce(1), cost=slowed_down(1.0, 1.8, 2.5), oracles=True)
        for _ in range(2)
    )
    assert slow.digest == again.digest
    plain = simulate(settings, scarce(1), cost=COST).figures
    assert slow.figures.finished == plain.finished == 40
    assert slow.figures.span_s > plain.span_s


def test_simulation_slows_decoding_while_images_are_prepared() -> None:
    """One request decodes, alone, except for an image of another that takes a thread for 20 ms."""
    host = HostCost(image_ns=20_000_000, contention=(1.0, 2.0))
    cost = msgspec.structs.replace(COST, host=host)
    long = arrival(0, 0.0, Text(0, 10), outputs=100)
    image = arrival(1, 10.0, Image("a", 16), Text(1, 10), outputs=1)
    alone = simulate(config(), workload_of("", [long]), cost=cost).figures.e2e_ms.p99
    beside = simulate(config(), workload_of("", [long, image]), cost=cost).figures.e2e_ms.p99
    assert beside > alone + 15


def failed(*outages: GroupOutage, sets: tuple[str, ...] = SCARCE) -> dict[str, int]:
    """Number of failed requests by code; the others must have finished."""
    outcome = simulate(config(*sets), scarce(3), cost=COST, outages=outages, oracles=True)
    figures = outcome.figures
    assert figures.finished + sum(figures.failed.values()) == figures.requests == 40
    return figures.failed


def test_outage_ends_no_request() -> None:
    assert failed(GroupOutage(group="generate", at_ns=30 * MS, duration_ns=70 * MS)) == {}
    assert failed(GroupOutage(group="encode", at_ns=10 * MS, duration_ns=90 * MS)) == {}


def test_outage_takes_time() -> None:
    plain = simulate(config(*SCARCE), scarce(3), cost=COST)
    lost = GroupOutage(group="generate", at_ns=30 * MS, duration_ns=70 * MS)
    longer = simulate(config(*SCARCE), scarce(3), cost=COST, outages=[lost])
    difference_s = longer.figures.span_s - plain.figures.span_s
    assert 0.05 < difference_s < 0.2
    assert longer.figures.itl_ms.p99 >= plain.figures.itl_ms.p99


def test_permanent_outage_of_the_only_group_ends_all_requests() -> None:
    assert set(failed(GroupOutage(group="generate", at_ns=30 * MS))) == {"given_up"}


def test_outage_for_good_moves_requests_to_another_group() -> None:
    sets = (*SCARCE, "generate.replicas=2")
    assert failed(GroupOutage(group="generate-1", at_ns=30 * MS), sets=sets) == {}


def test_outage_takes_a_shared_process_with_it() -> None:
    sets = (*SCARCE, 'placement="together"')
    assert failed(GroupOutage(group="encode", at_ns=30 * MS, duration_ns=20 * MS), sets=sets) == {}


def test_outages_of_every_moment_are_survived() -> None:
    for start in range(10):
        failed(
            GroupOutage(group="generate", at_ns=10 * start * MS, duration_ns=5 * MS),
            GroupOutage(group="encode", at_ns=7 * start * MS, duration_ns=(3 * start + 20) * MS),
        )


def test_overlapping_outages_are_one() -> None:
    """Of two groups that share a process as well: both are lost, once."""
    settings = config(*SCARCE, 'placement="together"', "encode.replicas=2", "generate.replicas=2")
    overlapping = [
        GroupOutage(group=group, at_ns=at_ms * MS, duration_ns=30 * MS)
        for group, at_ms in (("generate-1", 60), ("encode-1", 50), ("generate-1", 10))
    ]
    whole = [
        GroupOutage(group="encode-1", at_ns=10 * MS, duration_ns=30 * MS),
        GroupOutage(group="encode-1", at_ns=50 * MS, duration_ns=40 * MS),
    ]
    one, same = (
        simulate(settings, scarce(3), cost=COST, outages=outages, oracles=True)
        for outages in (overlapping, whole)
    )
    assert one.figures.finished == one.figures.requests == 40
    assert one.digest == same.digest


def test_outage_of_an_unknown_group_is_refused() -> None:
    outage = GroupOutage(group="generate-7", at_ns=0)
    with pytest.raises(ConfigError, match="generate-7: no such group. Known: encode, generate"):
        simulate(config(), scarce(0), cost=COST, outages=[outage])
