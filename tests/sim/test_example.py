"""An example to copy: a complete engine on a virtual clock, requests that share images, and any faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vsched.sim.cluster import SimEngine
from vsched.sim.faults import FaultPlan, WorkerCrash
from vsched.sim.workload.requests import Arrival

Engines = Callable[..., SimEngine]
SECOND_NS = 1_000_000_000


@pytest.mark.sim(seeds=5)
async def test_requests_survive_whatever_happens(
    sim_engine: Engines, workload: tuple[Arrival, ...], faults: FaultPlan
) -> None:
    """A failure is reported with its seed, its faults, and the command that repeats it."""
    async with sim_engine(faults=faults) as engine:
        await engine.run(workload)
        await engine.heal()  # all requests have ended, every output is right, nothing is held


@pytest.mark.sim
async def test_answer_goes_on_after_a_crash(
    sim_engine: Engines, workload: tuple[Arrival, ...]
) -> None:
    plan = FaultPlan(faults=(WorkerCrash(at_ns=SECOND_NS, group="generate"),))
    async with sim_engine(faults=plan) as engine:
        await engine.sleep_until(SECOND_NS)
        session = engine.send(workload[0])
        await session.done.wait()
        assert (session.outcome, session.received.text) == ("finished", session.expected.text)
        assert session.ended_ns - session.sent_ns < 2 * SECOND_NS
