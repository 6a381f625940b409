"""A fault plan, read by the simulator of whole groups."""

from __future__ import annotations

import pytest

from tests.unit.sim.shapes import COST, SCARCE, config, scarce
from vsched.errors import ConfigError
from vsched.sim.fast.groups import GroupFault, group_faults
from vsched.sim.fast.simulation import simulate
from vsched.sim.faults import (
    AnyFault,
    DecodeError,
    Disconnect,
    FaultPlan,
    FetchStall,
    GroupOutage,
    Hang,
    LateHeartbeat,
    LostHeartbeat,
    MessageFault,
    MissedDecision,
    OutOfMemory,
    Partition,
    ReplicaRestart,
    Slowdown,
    TiePermutation,
    WorkerCrash,
)

SECOND = 1_000_000_000
TOGETHER = 'placement="together"'


def read(*faults: AnyFault, sets: tuple[str, ...] = ()) -> list[GroupFault]:
    settings = config("deadlines.rank_timeout_s=5", "deadlines.heartbeat_s=1", *sets)
    return group_faults(FaultPlan(faults=faults), settings.config, restart_s=3)


@pytest.mark.parametrize("kind", [WorkerCrash, OutOfMemory, MissedDecision, ReplicaRestart])
def test_plan_whatever_takes_a_group_down_is_an_outage(kind: type[WorkerCrash]) -> None:
    assert read(kind(at_ns=2 * SECOND, group="generate")) == [
        GroupOutage(group="generate", at_ns=2 * SECOND, duration_ns=3 * SECOND)
    ]


@pytest.mark.parametrize("kind", [Hang, Partition])
def test_plan_stall_holds_a_group_until_it_is_noticed(kind: type[Hang]) -> None:
    short = kind(at_ns=SECOND, duration_ns=2 * SECOND, group="generate")
    assert read(short) == [Hang(group="generate", at_ns=1 * SECOND, duration_ns=2 * SECOND)]
    long = kind(at_ns=SECOND, duration_ns=60 * SECOND, group="generate")
    assert read(long) == [
        Hang(group="generate", at_ns=1 * SECOND, duration_ns=5 * SECOND),
        GroupOutage(group="generate", at_ns=6 * SECOND, duration_ns=3 * SECOND),
    ]


def test_plan_slowdown_is_one_of_the_group() -> None:
    slow = Slowdown(at_ns=SECOND, duration_ns=SECOND, group="generate", factor=7.0)
    assert read(slow) == [slow]


def test_plan_group_that_is_down_is_not_lost_again() -> None:
    crashes = [WorkerCrash(at_ns=at_s * SECOND, group="generate") for at_s in (9, 1, 3)]
    assert read(*crashes) == [
        GroupOutage(group="generate", at_ns=1 * SECOND, duration_ns=5 * SECOND),
        GroupOutage(group="generate", at_ns=9 * SECOND, duration_ns=3 * SECOND),
    ]


def test_plan_groups_of_one_process_are_lost_once() -> None:
    crashes = [
        WorkerCrash(at_ns=SECOND, group="generate-1"),
        WorkerCrash(at_ns=SECOND, group="encode-0"),
        WorkerCrash(at_ns=2 * SECOND, group="encode-1"),
    ]
    assert read(*crashes, sets=(TOGETHER, "encode.replicas=2", "generate.replicas=2")) == [
        GroupOutage(group="generate-1", at_ns=1 * SECOND, duration_ns=4 * SECOND),
        GroupOutage(group="encode-0", at_ns=1 * SECOND, duration_ns=3 * SECOND),
    ]


@pytest.mark.parametrize(
    "fault",
    [
        DecodeError(),
        Disconnect(phase="wait"),
        FetchStall(duration_ns=1),
        LateHeartbeat(group="encode", late_ns=1),
        LostHeartbeat(group="encode"),
        MessageFault(group="encode", duration_ns=1),
        TiePermutation(),
    ],
)
def test_plan_of_what_groups_do_not_have_is_refused(fault: AnyFault) -> None:
    kind = type(fault).__struct_config__.tag
    with pytest.raises(ConfigError, match=f"faults: {kind} at 0 s: .*--swarm"):
        read(fault)


def test_plan_faults_lose_no_request() -> None:
    plan = FaultPlan(
        faults=(
            WorkerCrash(at_ns=SECOND // 30, group="generate"),
            Hang(at_ns=SECOND // 20, duration_ns=SECOND // 50, group="encode"),
            Slowdown(at_ns=0, duration_ns=SECOND, group="generate", factor=2.0),
        )
    )
    settings = config(*SCARCE)
    outcome = simulate(settings, scarce(3), cost=COST, faults=plan, restart_s=0.1, oracles=True)
    figures = outcome.figures
    assert figures.finished == figures.requests == 40
