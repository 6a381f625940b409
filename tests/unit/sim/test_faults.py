from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, find, settings

from tests.each_case import each_case
from vsched.errors import ConfigError
from vsched.sim.faults import (
    FAULTS_MAX,
    KINDS,
    AnyFault,
    Disconnect,
    FaultPlan,
    Hang,
    HostCrash,
    Partition,
    Slowdown,
    WorkerCrash,
    random_plan,
)
from vsched.testing.strategies import fault_plans

MS = 1_000_000
GROUPS = ["encode-0", "generate-0", "generate-1"]
SPAN_NS = 10_000 * MS


def plans(count: int) -> list[FaultPlan]:
    return [random_plan(random.Random(seed), GROUPS, SPAN_NS, ranks=2) for seed in range(count)]


def test_plan_reads_back_from_json_as_it_was() -> None:
    """A fault a line."""
    drawn = plans(300)
    assert {type(fault) for plan in drawn for fault in plan.faults} == set(KINDS)
    for plan in (*drawn, FaultPlan()):
        assert FaultPlan.from_json(plan.to_json()) == plan
    crash = WorkerCrash(at_ns=5, group="generate-0")
    plan = FaultPlan(seed=7, faults=(crash, Disconnect(phase="wait")))
    assert plan.to_json().splitlines() == [
        '{"seed": 7, "faults": [',
        '  {"kind":"worker_crash","at_ns":5,"group":"generate-0","rank":0,"moment":"before_reply"},',
        '  {"kind":"disconnect","at_ns":0,"phase":"wait"}',
        "]}",
    ]


@each_case(
    ("text", "complaint"),
    [
        (None, "No such file"),
        ("[]", "this is no fault plan"),
        ("{", "truncated"),
        ('{"faults": [{"kind": "earthquake"}]}', "earthquake"),
        (
            '{"faults": [{"kind": "hang", "group": "g", "duration_ns": -1}]}',
            r"\$.faults\[0\].duration_ns",
        ),
        ('{"faults": [{"kind": "decode_error", "grup": "g"}]}', "grup"),
        ('{"faults": [{"kind": "disconnect"}]}', "phase"),
        ('{"faults": [{"kind": "disconnect", "phase": "asleep"}]}', "asleep"),
        ('{"sed": 1}', "sed"),
    ],
)
def test_plan_that_is_wrong_is_refused_with_the_file_and_the_place(
    text: str | None, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"plan\.json: .*{complaint}"):
        FaultPlan.load(path)
    path.write_text(plans(1)[0].to_json())
    assert FaultPlan.load(path) == plans(1)[0]
    path.unlink()


def test_random_plan_is_its_seed_and_keeps_to_the_stage() -> None:
    assert plans(50) == plans(50)
    drawn = plans(200)
    assert len({plan.to_json() for plan in drawn}) == 200
    for plan in drawn:
        assert len(plan.faults) <= FAULTS_MAX
        times_ns = [fault.at_ns for fault in plan.faults]
        assert times_ns == sorted(times_ns)
        for fault in plan.faults:
            assert fault.at_ns <= SPAN_NS
            assert getattr(fault, "group", GROUPS[0]) in GROUPS
            assert getattr(fault, "rank", 0) in {0, 1}


SHRINKING = settings(
    max_examples=20_000,  # the first bad one ends the search
    database=None,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def test_strategy_draws_faults_of_hosts_only_if_there_are_some() -> None:
    def has_a_crash(plan: FaultPlan) -> bool:
        return any(isinstance(fault, HostCrash) for fault in plan.faults)

    plans = fault_plans(GROUPS, SPAN_NS, kinds=[Hang, HostCrash], hosts=["far"])
    (crash,) = find(plans, has_a_crash, settings=SHRINKING).faults
    assert isinstance(crash, HostCrash)
    assert crash.host == "far"
    with pytest.raises(ValueError, match=r"HostCrash strikes a host, and there is none. Remedy:"):
        fault_plans(GROUPS, SPAN_NS, kinds=[Hang, HostCrash])


@pytest.mark.slow
def test_strategy_shrinks_to_the_two_faults_that_matter() -> None:
    """A planted bug: the generate group crashes after one of its links was cut for over a second."""

    def is_bad(plan: FaultPlan) -> bool:
        crashes = [fault for fault in plan.faults if isinstance(fault, WorkerCrash)]
        cuts = [fault for fault in plan.faults if isinstance(fault, Partition)]
        return any(
            crash.group == cut.group == "generate-0"
            and cut.duration_ns > 1000 * MS
            and cut.at_ns < crash.at_ns
            for crash in crashes
            for cut in cuts
        )

    kinds: list[type[AnyFault]] = [Disconnect, Slowdown, Hang, WorkerCrash, Partition]
    plans = fault_plans(["encode-0", "generate-0"], SPAN_NS, ranks=2, kinds=kinds)
    found = find(plans, is_bad, settings=SHRINKING)
    assert found.seed == 0
    assert sorted(found.faults, key=lambda fault: fault.at_ns) == [
        Partition(at_ns=0, duration_ns=1001 * MS, group="generate-0"),
        WorkerCrash(at_ns=MS, group="generate-0"),
    ]
