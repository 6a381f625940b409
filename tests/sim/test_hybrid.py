"""Engines of a model whose layers keep a state: no request ever resumes with the state of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from vsched.config import Config
from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.cluster.plugin import HYBRID
from vsched.sim.faults import FaultPlan
from vsched.sim.workload.requests import Arrival

Engines = Callable[..., SimEngine]


def hybrid_config(**generate: Any) -> Config:
    base = small_config()
    return msgspec.structs.replace(
        base,
        model=msgspec.structs.replace(base.model, path=HYBRID),
        generate=msgspec.structs.replace(base.generate, **generate),
    )


@pytest.mark.sim(seeds=4)
@pytest.mark.parametrize("places", [0, 1, 4])
async def test_states_survive_whatever_happens(
    sim_engine: Engines, workload: tuple[Arrival, ...], faults: FaultPlan, places: int
) -> None:
    """Requests share prefixes, are preempted, and lose their ranks; a rank reports a wrong state."""
    async with sim_engine(hybrid_config(state_snapshots=places), faults=faults) as engine:
        await engine.run(workload)
        await engine.heal()
        assert places or not engine.engine.statistics()["generate"]["tokens_cached"]


@pytest.mark.sim
async def test_beginning_is_taken_from_a_snapshot(
    sim_engine: Engines, workload: tuple[Arrival, ...]
) -> None:
    """The same prompt again: all but its last block is cached, with the state at its end."""
    longest = max(workload, key=lambda one: len(str(one.prompt)))
    async with sim_engine(hybrid_config()) as engine:
        for name in ("first", "second"):
            session = engine.send(msgspec.structs.replace(longest, request_id=name))
            await session.done.wait()
            assert (session.outcome, session.received.text) == ("finished", session.expected.text)
        assert engine.engine.statistics()["generate"]["tokens_cached"] > 0
