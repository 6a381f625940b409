"""Groups of the fast simulator: links to other hosts, contention for cores, and outages."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.sim.shapes import COST, SCARCE, arrival, config, scarce
from vsched.errors import ConfigError
from vsched.sim.cost.model import CostModel, HostCost
from vsched.sim.fast.groups import (
    Contention,
    GroupOutage,
    SharedWork,
)
from vsched.sim.fast.simulation import simulate
from vsched.sim.workload.requests import Image, Text, workload_of

MS = 1_000_000


class Doing(SharedWork):
    def __init__(self, process: str = "") -> None:
        self.process = process or self


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


def test_contention_slows_work_down_while_there_is_company() -> None:
    announced, one, other = Announced(1.0, 2.0), Doing(), Doing()
    announced.contention.enter(one, 100, 0)
    announced.contention.enter(other, 30, 40)
    assert announced.end(one) == 40 + 60 * 2
    assert announced.end(other) == 40 + 30 * 2
    announced.contention.leave(other, 100)
    assert announced.end(one) == 100 + 30  # 40 were done alone, and 30 in company
    assert one.incarnation == 3


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


@pytest.mark.parametrize(
    ("outage", "sets", "codes"),
    [
        (GroupOutage(group="generate", at_ns=30 * MS, duration_ns=70 * MS), (), set()),
        (GroupOutage(group="encode", at_ns=10 * MS, duration_ns=90 * MS), (), set()),
        (GroupOutage(group="generate", at_ns=30 * MS), (), {"given_up"}),
        (GroupOutage(group="generate-1", at_ns=30 * MS), ("generate.replicas=2",), set()),
        (
            GroupOutage(group="encode", at_ns=30 * MS, duration_ns=20 * MS),
            ('placement="together"',),
            set(),
        ),
    ],
    ids=["generate", "encode", "the only group for good", "one of two for good", "shared process"],
)
def test_outage_ends_requests_only_without_another_group(
    outage: GroupOutage, sets: tuple[str, ...], codes: set[str]
) -> None:
    assert set(failed(outage, sets=(*SCARCE, *sets))) == codes


def test_outage_takes_time() -> None:
    plain = simulate(config(*SCARCE), scarce(3), cost=COST)
    lost = GroupOutage(group="generate", at_ns=30 * MS, duration_ns=70 * MS)
    longer = simulate(config(*SCARCE), scarce(3), cost=COST, outages=[lost])
    difference_s = longer.figures.span_s - plain.figures.span_s
    assert 0.05 < difference_s < 0.2
    assert longer.figures.itl_ms.p99 >= plain.figures.itl_ms.p99


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
