"""The swarm finds known defects: each is planted, and shows within a thousand seeds."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.sim.planted import PLANTS, Plant, planted
from vsched.sim.cluster.scenario import draw_scenario, run_guarded

SEEDS = range(1000)


@pytest.mark.filterwarnings("ignore")  # planted defects leave things behind
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_swarm_finds_a_planted_bug(plant: Plant) -> None:
    """By the known seed or, after changes of decisions, by another."""
    with planted(plant):
        for seed in chain([plant.seed], SEEDS):
            report = run_guarded(draw_scenario(seed))
            if report.violations:
                return
            if plant.twice and run_guarded(draw_scenario(seed)).digest != report.digest:
                return
    pytest.fail(f"{plant.name} was not found in {len(SEEDS)} scenarios")
