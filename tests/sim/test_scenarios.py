"""Engines of many shapes, with any faults: invariants hold, and all heal."""

from __future__ import annotations

import pytest

from vsched.sim.cluster import draw_scenario
from vsched.sim.cluster.scenario import FIRST_PRESSED, play
from vsched.sim.invariants import SimulationFailed
from vsched.testing.plugin import SimCase

SEEDS = (*range(30), *range(FIRST_PRESSED, FIRST_PRESSED + 20))
"""Each kind of scenario, of which there are ten, and half of the last ones under pressure."""


@pytest.mark.sim(seeds=SEEDS)
async def test_scenario_heals(sim: SimCase) -> None:
    """The same as `vsched simulate --swarm`, with ties permuted in addition."""
    scenario = draw_scenario(sim.seed)
    report = await play(scenario.with_faults(sim.faults_or(scenario.plan)))
    if report.violations:
        raise SimulationFailed("\n".join(report.violations))
