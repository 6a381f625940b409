from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from vsched import probes
from vsched.errors import ConfigError
from vsched.probes import armed, fault_point
from vsched.sim.faults import (
    FAULTS_MAX,
    HOST_KINDS,
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
    drawn = plans(300)
    assert {type(fault) for plan in drawn for fault in plan.faults} == set(KINDS)
    for plan in drawn:
        assert FaultPlan.from_json(plan.to_json()) == plan
    assert FaultPlan.from_json(FaultPlan().to_json()) == FaultPlan()


def test_plan_in_json_is_a_fault_a_line() -> None:
    plan = FaultPlan(
        seed=7, faults=(WorkerCrash(at_ns=5, group="generate-0"), Disconnect(phase="wait"))
    )
    assert plan.to_json().splitlines() == [
        '{"seed": 7, "faults": [',
        '  {"kind":"worker_crash","at_ns":5,"group":"generate-0","rank":0,"moment":"before_reply"},',
        '  {"kind":"disconnect","at_ns":0,"phase":"wait"}',
        "]}",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "truncated"),
        ('{"faults": [{"kind": "earthquake"}]}', "earthquake"),
        ('{"faults": [{"kind": "hang", "group": "g", "duration_ns": -1}]}', r"\$.faults\[0\].duration_ns"),
        ('{"faults": [{"kind": "decode_error", "grup": "g"}]}', "grup"),
        ('{"faults": [{"kind": "disconnect"}]}', "phase"),
        ('{"faults": [{"kind": "disconnect", "phase": "asleep"}]}', "asleep"),
        ('{"sed": 1}', "sed"),
    ],
)  # fmt: skip
def test_plan_that_is_wrong_is_refused_with_the_place(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        FaultPlan.from_json(text)


def test_plan_is_loaded_from_a_file_whose_name_an_error_gives(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ConfigError, match=r"plan\.json: No such file"):
        FaultPlan.load(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"plan\.json: this is no fault plan"):
        FaultPlan.load(path)
    plan = plans(1)[0]
    path.write_text(plan.to_json())
    assert FaultPlan.load(path) == plan


def test_random_plan_is_its_seed_and_keeps_to_the_stage() -> None:
    assert plans(50) == plans(50)
    drawn = plans(200)
    assert len({plan.to_json() for plan in drawn}) == 200
    for plan in drawn:
        assert len(plan.faults) <= FAULTS_MAX
        assert [fault.at_ns for fault in plan.faults] == sorted(
            fault.at_ns for fault in plan.faults
        )
        for fault in plan.faults:
            assert fault.at_ns <= SPAN_NS
            assert getattr(fault, "group", GROUPS[0]) in GROUPS
            assert getattr(fault, "rank", 0) in {0, 1}


# --- shrinking ---

SHRINKING = settings(
    max_examples=20_000,  # the first bad one ends the search
    database=None,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
def test_strategy_draws_faults_of_hosts_if_there_are_some() -> None:
    seen: set[type[AnyFault]] = set()

    @settings(SHRINKING, max_examples=400, phases=[Phase.generate])
    @given(fault_plans(GROUPS, SPAN_NS, hosts=["far", "farther"]))
    def collect(plan: FaultPlan) -> None:
        seen.update(type(fault) for fault in plan.faults)
        assert {getattr(fault, "host", "far") for fault in plan.faults} <= {"far", "farther"}

    collect()
    assert seen == {*KINDS, *HOST_KINDS}


def test_kind_of_a_host_without_hosts_is_an_error() -> None:
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
    found = hypothesis.find(plans, is_bad, settings=SHRINKING)
    assert found.seed == 0
    assert sorted(found.faults, key=lambda fault: fault.at_ns) == [
        Partition(at_ns=0, duration_ns=1001 * MS, group="generate-0"),
        WorkerCrash(at_ns=MS, group="generate-0"),
    ]


def test_fault_point_does_next_to_nothing_while_nothing_is_armed() -> None:
    """Counted, not timed: a lookup of one name, a comparison, a return; and no call."""
    steps: list[str] = []

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        frame.f_trace_opcodes = True
        steps.append(event)
        return trace

    sys.settrace(trace)
    try:
        fault_point("media.decode")
    finally:
        sys.settrace(None)
    assert steps.count("call") == 1
    assert steps.count("opcode") <= 7


def test_fault_point_calls_whoever_is_armed_and_raises_what_it_raises() -> None:
    visits: list[tuple[str, str]] = []

    def refuse(name: str, subject: str) -> None:
        raise ValueError(f"{name} {subject}")

    with armed(lambda *session: visits.append(session)):
        fault_point("media.decode")
        with armed(refuse), pytest.raises(ValueError, match="rank.step generate-0"):
            fault_point("rank.step", "generate-0")
        fault_point("rank.step", "generate-1")
    fault_point("media.decode")
    assert visits == [("media.decode", ""), ("rank.step", "generate-1")]
    assert probes._on_point is None
