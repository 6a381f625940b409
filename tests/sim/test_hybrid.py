"""Whole engines of a model whose layers keep a state: whatever happens, none goes on from another's."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from vsched.config import Config
from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.cluster.plugin import HYBRID
from vsched.sim.faults.plan import FaultPlan
from vsched.sim.workload.requests import Arrival

Engines = Callable[..., SimEngine]


def hybrid_config() -> Config:
    base = small_config()
    return msgspec.structs.replace(base, model=msgspec.structs.replace(base.model, path=HYBRID))


@pytest.mark.sim(seeds=5)
async def test_states_survive_whatever_happens(
    sim_engine: Engines, workload: tuple[Arrival, ...], faults: FaultPlan
) -> None:
    """Requests share beginnings, are preempted, and lose their ranks; a rank says where a state is not its own."""
    async with sim_engine(hybrid_config(), faults=faults) as engine:
        await engine.run(workload)
        await engine.heal()
        assert engine.engine.statistics()["generate"]["tokens_cached"] == 0
        assert not engine.world.violations
