"""Engines of models with bidirectional positions: no chunk ever splits a bidirectional span."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.cluster.plugin import SEES_IMAGES, SEES_PROMPTS
from vsched.sim.faults import FaultPlan
from vsched.sim.workload.requests import Arrival

Engines = Callable[..., SimEngine]


@pytest.mark.sim(seeds=4)
@pytest.mark.parametrize("path", [SEES_IMAGES, SEES_PROMPTS])
async def test_bidirectional_spans_are_never_split(
    sim_engine: Engines, workload: tuple[Arrival, ...], faults: FaultPlan, path: str
) -> None:
    """Chunks are smaller than images, requests are preempted and lose their ranks; observers check every decision."""
    base = small_config()
    room = 72 if path == SEES_IMAGES else 260
    config = msgspec.structs.replace(
        base,
        model=msgspec.structs.replace(base.model, path=path),
        generate=msgspec.structs.replace(base.generate, max_batch_tokens=room),
    )
    async with sim_engine(config, faults=faults) as engine:
        await engine.run(workload)
        await engine.heal()
        statistics = engine.engine.statistics()
        assert statistics["generate"]["admitted"] > 0
        assert path == SEES_IMAGES or not statistics["generate"]["tokens_cached"]
