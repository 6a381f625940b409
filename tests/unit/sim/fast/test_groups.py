"""Groups of the fast simulator: links to other hosts, contention for cores, and outages."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.sim.shapes import COST, SCARCE, arrival, config, scarce
from vsched.errors import ConfigError
from vsched.sim.cost.model import CostModel, HostCost
from vsched.sim.fast.groups import GroupOutage
from vsched.sim.fast.simulation import simulate
from vsched.sim.workload.requests import Image, Text, workload_of

MS = 1_000_000


def slowed_down(*contention: float) -> CostModel:
    host: HostCost = msgspec.structs.replace(COST.host, contention=contention)
    return msgspec.structs.replace(COST, host=host)


@pytest.mark.parametrize(
    "placement", ["separate", pytest.param("together", marks=pytest.mark.thorough)]
)
def test_simulation_with_contention_takes_longer_and_repeats(placement: str) -> None:
    settings = config(*SCARCE, f"placement={placement}")
    plain, alike, slow, again = (
        simulate(settings, scarce(1), cost=slowed_down(*contention), oracles=True)
        for contention in ((), (1.0, 1.0, 1.0), (1.0, 1.8, 2.5), (1.0, 1.8, 2.5))
    )
    assert alike.digest == plain.digest
    assert slow.digest == again.digest != plain.digest
    assert slow.figures.finished == plain.figures.finished == 40
    assert slow.figures.span_s > plain.figures.span_s


@pytest.mark.parametrize("images", [1, 2])
def test_simulation_slows_decoding_while_images_are_prepared(images: int) -> None:
    """One request decodes, alone, except for images that take threads of the engine 20 ms, and twice that together."""
    host = HostCost(image_ns=20_000_000, contention=(1.0, 2.0, 9.0))
    cost = msgspec.structs.replace(COST, host=host)
    long = arrival(0, 0.0, Text(0, 10), outputs=100)
    others = [
        arrival(number, 10.0, Image(f"{number}", 16), Text(number, 10), outputs=1)
        for number in range(1, 1 + images)
    ]
    alone = simulate(config(), workload_of("", [long]), cost=cost).figures.e2e_ms.p99
    beside = simulate(config(), workload_of("", [long, *others]), cost=cost).figures.e2e_ms.p99
    assert alone + 15 < beside < alone + 30, "the threads are one process"


@pytest.mark.parametrize(
    ("outage", "sets", "codes"),
    [
        (GroupOutage(group="generate", at_ns=30 * MS, duration_ns=70 * MS), [], set()),
        (GroupOutage(group="encode", at_ns=10 * MS, duration_ns=90 * MS), [], set()),
        (GroupOutage(group="generate", at_ns=30 * MS), [], {"given_up"}),
        (GroupOutage(group="generate-1", at_ns=30 * MS), ["generate.replicas=2"], set()),
        (
            GroupOutage(group="encode", at_ns=30 * MS, duration_ns=20 * MS),
            ['placement="together"'],
            set(),
        ),
    ],
    ids=["generate", "encode", "the only group for good", "one of two for good", "shared process"],
)
def test_outage_ends_requests_only_without_another_group(
    outage: GroupOutage, sets: list[str], codes: set[str]
) -> None:
    settings = config(*SCARCE, *sets)
    figures = simulate(settings, scarce(3), cost=COST, outages=[outage], oracles=True).figures
    assert figures.finished + sum(figures.failed.values()) == figures.requests == 40
    assert set(figures.failed) == codes


def test_outage_takes_time() -> None:
    lost = GroupOutage(group="generate", at_ns=30 * MS, duration_ns=70 * MS)
    plain, longer = (
        simulate(config(*SCARCE), scarce(3), cost=COST, outages=outages).figures
        for outages in ([], [lost])
    )
    assert 0.05 < longer.span_s - plain.span_s < 0.2
    assert longer.itl_ms.p99 >= plain.itl_ms.p99


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
