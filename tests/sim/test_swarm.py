"""The swarm: scenarios of many shapes heal from any faults, and planted defects are found, reported and repeated."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import get_args

import pytest

from tests.sim.planted import PLANTS, Plant, planted
from vsched.policy import Admission, AdmissionView, PreemptionMode, RequestPolicy
from vsched.sim.cluster.scenario import FIRST_PRESSED, draw_scenario, play, run_guarded, swarm
from vsched.sim.faults import DecodeError, FaultPlan, TiePermutation
from vsched.sim.invariants import SimulationFailed
from vsched.testing.plugin import SimCase

LEAK = next(plant for plant in PLANTS if plant.name == "a permit leak")
ignoring = pytest.mark.filterwarnings("ignore")
"""Planted defects leave things behind."""


async def play_with_ties(sim: SimCase) -> None:
    """The same as `vsched simulate --swarm`, with ties permuted in addition."""
    scenario = draw_scenario(sim.seed)
    report = await play(scenario.with_faults(sim.faults_or(scenario.plan)))
    if report.violations:
        raise SimulationFailed("\n".join(report.violations))


@pytest.mark.sim(seeds=(*range(10), *range(FIRST_PRESSED, FIRST_PRESSED + 5)))
async def test_scenario_heals(sim: SimCase) -> None:
    """Each kind of scenario, of which there are ten, and some under pressure."""
    await play_with_ties(sim)


@pytest.mark.thorough
@pytest.mark.sim(seeds=(*range(10, 30), *range(FIRST_PRESSED + 5, FIRST_PRESSED + 20)))
async def test_scenario_heals_with_other_seeds(sim: SimCase) -> None:
    await play_with_ties(sim)


OFTEN = {"a permit leak", "a missed slot field", "a lost terminal reply"}


@ignoring
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(one, id=one.name, marks=() if one.name in OFTEN else pytest.mark.thorough)
        for one in PLANTS
    ],
)
def test_swarm_finds_a_planted_bug(plant: Plant) -> None:
    """By the known seed or, after changes of decisions, by another."""
    with planted(plant):
        for seed in chain([plant.seed], range(1000)):
            report = run_guarded(draw_scenario(seed))
            if report.violations:
                return
            if plant.twice and run_guarded(draw_scenario(seed)).digest != report.digest:
                return
    pytest.fail(f"{plant.name} was not found in a thousand scenarios")


def test_swarm_counts_its_scenarios_and_takes_a_plan(tmp_path: Path) -> None:
    seeds: list[int] = []
    outcome = swarm(3, seed=7, on_report=lambda seed, _: seeds.append(seed))
    assert seeds == [7, 8, 9]
    assert (outcome.scenarios, outcome.failures) == (3, [])
    assert min(outcome.requests, outcome.events, outcome.virtual_s) > 0
    file = tmp_path / "plan.json"
    file.write_text(FaultPlan(faults=(TiePermutation(),)).to_json())
    outcome = swarm(2, faults=file)
    assert (outcome.struck, outcome.failures) == (2, [])


@ignoring
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
    assert "memory to decode in are held without an owner" in reported
    assert f"vsched simulate --swarm 1 --seed {failure.seed}" in reported
    assert not swarm(1, seed=failure.seed).failures, "without the defect it passes"


# --- an admission policy that takes slots from running requests ---

victims: list[int] = []
"""Number of requests that each call of the policy preempted."""


class HighestFirst(RequestPolicy, frozen=True, kw_only=True):
    """Requests of a higher priority join first, and take the slots of all of a lower one."""

    preempts = True
    mode: PreemptionMode = "recompute"

    def admit(self, view: AdmissionView) -> Admission:
        waiting, running = view.waiting, view.running_requests
        order = sorted(range(len(waiting)), key=lambda index: -waiting[index].priority)
        joining, left = order[: view.entries_free], order[view.entries_free :]
        lower = sorted(view.eligible, key=lambda index: running[index].priority)
        preempted: list[int] = []
        for index, victim in zip(left, lower, strict=False):
            if waiting[index].priority <= running[victim].priority:
                break
            joining.append(index)
            preempted.append(victim)
        victims.append(len(preempted))
        return Admission(joining, preempt=preempted, mode=self.mode)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", get_args(PreemptionMode))
def test_swarm_passes_while_requests_give_up_their_slots(mode: PreemptionMode) -> None:
    victims.clear()
    table = {"use": f"{__name__}:HighestFirst", "mode": mode}
    outcome = swarm(12, seed=500, policies={"generate.admission": table})
    assert not outcome.failures, outcome.failures[0]
    assert sum(victims) > 3, "hardly any request gave up its slot"
    assert outcome.losses > 5, "hardly any group was lost"


def test_no_place_of_a_joining_request_is_written_in_the_same_step() -> None:
    """Found by the swarm: the next request took a slot, and the swapped blocks of its victim came first."""
    table = {"use": f"{__name__}:HighestFirst", "mode": "swap"}
    outcome = swarm(1, seed=3151, policies={"generate.admission": table})
    assert not outcome.failures, outcome.failures[0]
