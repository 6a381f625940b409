"""The swarm: its report of a failing scenario, and how to repeat one."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from tests.sim.planted import PLANTS, planted
from vsched.cli.simulate_command import run_swarm
from vsched.errors import ConfigError
from vsched.sim.cluster.scenario import swarm
from vsched.sim.faults import DecodeError, FaultPlan, TiePermutation

LEAK = next(plant for plant in PLANTS if plant.name == "a permit leak")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_swarm_counts_what_it_did() -> None:
    seeds: list[int] = []
    outcome = swarm(3, seed=7, on_report=lambda seed, _: seeds.append(seed))
    assert seeds == [7, 8, 9]
    assert outcome.scenarios == 3
    assert not outcome.failures
    assert min(outcome.requests, outcome.events, outcome.virtual_s) > 0


def test_swarm_keeps_the_faults_that_it_takes(tmp_path: Path) -> None:
    with planted(LEAK):
        failure = swarm(300, seed=LEAK.seed).failures[0]
        assert [type(fault) for fault in failure.plan.faults] == [DecodeError]
        assert failure.dropped > 0
        file = tmp_path / "plan.json"
        file.write_text(failure.plan.to_json())
        again = swarm(1, seed=failure.seed, faults=file).failures[0]
    assert again.violations == failure.violations
    reported = failure.describe()
    assert f"seed {failure.seed} fails:" in reported
    assert "memory to decode in are held by nobody" in reported
    assert f"vsched simulate --swarm 1 --seed {failure.seed}" in reported
    assert not swarm(1, seed=failure.seed).failures, "without the defect it passes"


def test_swarm_takes_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(FaultPlan(faults=(TiePermutation(),)).to_json())
    outcome = swarm(2, faults=file)
    assert (outcome.struck, outcome.failures) == (2, [])
    file.write_text("{}}")
    with pytest.raises(ConfigError, match="no fault plan"):
        swarm(1, faults=file)


def test_command_fails_with_the_swarm(capsys: pytest.CaptureFixture[str]) -> None:
    pinned = next(plant for plant in PLANTS if plant.name == "a cache view pinning its buffer")
    with planted(pinned), pytest.raises(typer.Exit) as caught:
        run_swarm(100, seed=pinned.seed, faults=None)
    assert caught.value.exit_code == 1
    out = capsys.readouterr().out
    assert "MemoryLeak" in out
    assert "replay: vsched simulate --swarm 1 --seed" in out
