"""Engines of many shapes, with any faults: invariants hold, and all heal."""

from __future__ import annotations

import pytest

from vsched.sim.cluster import draw_scenario
from vsched.sim.cluster.scenario import play
from vsched.sim.invariants import SimulationFailed
from vsched.testing.plugin import SimCase


@pytest.mark.sim(seeds=500)
async def test_scenario_heals(sim: SimCase) -> None:
    """The same as `vsched simulate --swarm 500`, with ties permuted in addition."""
    scenario = draw_scenario(sim.seed)
    report = await play(scenario.with_faults(sim.faults_or(scenario.plan)))
    if report.violations:
        raise SimulationFailed("\n".join(report.violations))
