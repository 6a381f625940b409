"""The swarm finds known defects: each is planted, and shows within a thousand seeds."""

from __future__ import annotations

import pytest

from tests.sim.planted import PLANTS, Plant, planted
from vsched.sim.cluster.swarm import swarm

SEEDS = 1000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # planted defects leave things behind
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_swarm_finds_a_planted_bug(plant: Plant) -> None:
    with planted(plant):
        outcome = swarm(SEEDS, twice=plant.twice)
    assert outcome.failures, f"{plant.name} was not found in {outcome.scenarios} scenarios"
