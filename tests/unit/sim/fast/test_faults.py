"""What goes wrong in the fast simulator: outages, failed encodings, slow groups; and what never may."""

from __future__ import annotations

import pytest

from tests.unit.sim.shapes import COST, SCARCE, arrival, config, scarce
from vsched.errors import ConfigError
from vsched.sim.fast.faults import EncodeFault, Outage, Pause, Slowness, Trouble
from vsched.sim.fast.run import simulate
from vsched.sim.workload.requests import Image, Text, workload_of


def failed(*troubles: Trouble, sets: tuple[str, ...] = SCARCE) -> dict[str, int]:
    """Return how many requests failed, by code; the others must have finished."""
    outcome = simulate(config(*sets), scarce(3), cost=COST, troubles=troubles, oracles=True)
    figures = outcome.figures
    assert figures.finished + sum(figures.failed.values()) == figures.requests == 40
    return figures.failed


def test_outage_ends_nobody() -> None:
    assert failed(Outage(group="generate", lost_s=0.03, back_s=0.1)) == {}
    assert failed(Outage(group="encode", lost_s=0.01, back_s=0.1)) == {}


def test_outage_takes_time() -> None:
    plain = simulate(config(*SCARCE), scarce(3), cost=COST)
    lost = Outage(group="generate", lost_s=0.03, back_s=0.1)
    longer = simulate(config(*SCARCE), scarce(3), cost=COST, troubles=[lost])
    difference_s = longer.figures.span_s - plain.figures.span_s
    assert 0.05 < difference_s < 0.2
    assert longer.figures.itl_ms.p99 >= plain.figures.itl_ms.p99


def test_outage_for_good_ends_everybody_where_it_was_the_only_group() -> None:
    assert set(failed(Outage(group="generate", lost_s=0.03))) == {"given_up"}


def test_outage_for_good_moves_requests_to_another_group() -> None:
    sets = (*SCARCE, "generate.replicas=2")
    assert failed(Outage(group="generate-1", lost_s=0.03), sets=sets) == {}


def test_outage_takes_a_shared_process_with_it() -> None:
    sets = (*SCARCE, 'placement="together"')
    assert failed(Outage(group="encode", lost_s=0.03, back_s=0.05), sets=sets) == {}


def test_outages_of_every_moment_are_survived() -> None:
    for start in range(10):
        failed(
            Outage(group="generate", lost_s=0.01 * start, back_s=0.01 * start + 0.005),
            Outage(group="encode", lost_s=0.007 * start, back_s=0.01 * start + 0.02),
        )


def test_pause_takes_its_time_and_loses_nothing() -> None:
    plain = simulate(config(*SCARCE), scarce(3), cost=COST)
    pause = Pause(group="generate", from_s=0.03, to_s=0.13)
    longer = simulate(config(*SCARCE), scarce(3), cost=COST, troubles=[pause])
    assert 0.05 < longer.figures.span_s - plain.figures.span_s < 0.15
    assert longer.figures.finished == plain.figures.finished


def test_encode_fault_is_retried() -> None:
    assert failed(EncodeFault(at_s=0.0)) == {}


def test_encode_fault_twice_alone_ends_who_wants_the_image() -> None:
    arrivals = [arrival(1, 0, Image("a", 50), Text(1, 5)), arrival(2, 100, Text(2, 5))]
    outcome = simulate(
        config(),
        workload_of("two", arrivals),
        cost=COST,
        oracles=True,
        troubles=[EncodeFault(at_s=0), EncodeFault(at_s=0)],
    )
    assert outcome.figures.failed == {"encode_failed": 1}
    assert outcome.figures.finished == 1


def test_slowness_lasts_for_its_span() -> None:
    plain, slow = (
        simulate(
            config(),
            workload_of("one", [arrival(1, 0, Text(1, 5), outputs=100)]),
            cost=COST,
            troubles=[Slowness(group="generate", from_s=0.02, to_s=0.05, factor=factor)],
        ).figures.e2e_ms.p50
        for factor in (1.0, 3.0)
    )
    assert slow - plain == pytest.approx(20, abs=3)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (
            Outage(group="generate-7", lost_s=0),
            "generate-7: no such group. Known: encode, generate",
        ),
        (EncodeFault(at_s=0, group="generate"), "generate: not an encode group"),
    ],
)
def test_troubles_of_no_group(trouble: Trouble, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(config(), scarce(0), cost=COST, troubles=[trouble])
