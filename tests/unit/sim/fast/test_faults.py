"""Faults in the fast simulator: outages, failed encodings, slow groups; and invariants that always hold."""

from __future__ import annotations

import pytest

from tests.unit.sim.shapes import COST, SCARCE, arrival, config, scarce
from vsched.errors import ConfigError
from vsched.sim.fast.simulation import simulate
from vsched.sim.faults import (
    AnyFault,
    FaultPlan,
    GroupOutage,
    Hang,
    OutOfMemory,
    Slowdown,
)
from vsched.sim.workload.requests import Image, Text, workload_of

MS = 1_000_000


def failed(*faults: AnyFault, sets: tuple[str, ...] = SCARCE) -> dict[str, int]:
    """Number of failed requests by code; the others must have finished."""
    outcome = simulate(
        config(*sets), scarce(3), cost=COST, faults=FaultPlan(faults=faults), oracles=True
    )
    figures = outcome.figures
    assert figures.finished + sum(figures.failed.values()) == figures.requests == 40
    return figures.failed


def test_outage_ends_no_request() -> None:
    assert failed(GroupOutage(group="generate", at_ns=30 * MS, duration_ns=70 * MS)) == {}
    assert failed(GroupOutage(group="encode", at_ns=10 * MS, duration_ns=90 * MS)) == {}


def test_outage_takes_time() -> None:
    plain = simulate(config(*SCARCE), scarce(3), cost=COST)
    lost = GroupOutage(group="generate", at_ns=30 * MS, duration_ns=70 * MS)
    longer = simulate(config(*SCARCE), scarce(3), cost=COST, faults=FaultPlan(faults=(lost,)))
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


def test_pause_takes_its_time_and_loses_nothing() -> None:
    plain = simulate(config(*SCARCE), scarce(3), cost=COST)
    pause = Hang(group="generate", at_ns=30 * MS, duration_ns=100 * MS)
    longer = simulate(config(*SCARCE), scarce(3), cost=COST, faults=FaultPlan(faults=(pause,)))
    assert 0.05 < longer.figures.span_s - plain.figures.span_s < 0.15
    assert longer.figures.finished == plain.figures.finished


def test_encoder_without_memory_tries_again() -> None:
    assert failed(OutOfMemory(group="encode")) == {}


def test_encoder_without_memory_twice_for_one_image_ends_its_request() -> None:
    arrivals = [arrival(1, 0, Image("a", 50), Text(1, 5)), arrival(2, 100, Text(2, 5))]
    outcome = simulate(
        config(),
        workload_of("two", arrivals),
        cost=COST,
        oracles=True,
        faults=FaultPlan(faults=(OutOfMemory(group="encode"),) * 2),
    )
    assert outcome.figures.failed == {"encode_failed": 1}
    assert outcome.figures.finished == 1


def test_slowness_lasts_for_its_span() -> None:
    plain, slow = (
        simulate(
            config(),
            workload_of("one", [arrival(1, 0, Text(1, 5), outputs=100)]),
            cost=COST,
            faults=FaultPlan(
                faults=(
                    Slowdown(group="generate", at_ns=20 * MS, duration_ns=30 * MS, factor=factor),
                )
            ),
        ).figures.e2e_ms.p50
        for factor in (1.0, 3.0)
    )
    assert slow - plain == pytest.approx(20, abs=3)


def test_fault_of_an_unknown_group_is_refused() -> None:
    plan = FaultPlan(faults=(GroupOutage(group="generate-7"),))
    with pytest.raises(ConfigError, match="generate-7: no such group. Known: encode, generate"):
        simulate(config(), scarce(0), cost=COST, faults=plan)
