"""Calibration and comparison of an engine with known costs: simulated ranks, everything else real."""

from __future__ import annotations

from random import Random

import pytest

from tests.unit.sim.cost.observed_engine import COSTS, watched_engine
from tests.unit.sim.virtual import play
from vsched.bench.fidelity.calibration import measure
from vsched.bench.fidelity.measure import FLOOD, Comparison, Run, at_rate
from vsched.sim.cost.calibration import predict
from vsched.sim.cost.model import CostModel, EncodeSample, GenerateSample
from vsched.sim.workload.requests import Arrival, Image, Text, Workload, workload_of

pytestmark = pytest.mark.slow


def requests(count: int) -> Workload:
    """Return requests of all kinds: with images and without, and turns of conversations."""
    rng = Random(7)
    return workload_of(
        "mixed",
        [
            Arrival(
                at_ns=int(number * 1e8 * rng.uniform(0.5, 1.5)),
                request_id=f"r{number}",
                prompt=(
                    *(
                        Image(f"{number}/{index}", rng.randint(8, 90))
                        for index in range(number % 3)
                    ),
                    Text(number, rng.randint(10, 200)),
                ),
                output_tokens=rng.randint(2, 40),
            )
            for number in range(count)
        ],
    )


async def calibrated(seconds: float = 20.0) -> tuple[CostModel, list[int]]:
    advances = []
    async with watched_engine() as (engine, texts):
        model = await measure(engine, texts, seconds, lambda done, _: advances.append(done))
    return model, advances


async def compared(model: CostModel) -> list[Run]:
    async with watched_engine() as (engine, texts):
        comparison = Comparison(engine, model, texts=texts)
        await comparison.warm_up(requests(40))
        flood = await comparison.run(comparison.flood_of(requests(40), 5), FLOOD)
        rate = 0.6 * flood.real.requests_s
        return [flood, await comparison.run(at_rate(requests(40), rate, 5), 0.6)]


def test_calibration_finds_the_costs_of_an_engine_and_simulates_it() -> None:
    """Observations of an engine match its cost model; a simulation with the fitted model is close to the engine."""
    model, advances = play(calibrated())
    assert advances == list(range(1, len(advances) + 1))
    for sample in (
        EncodeSample(items=3, tokens=175, pairs=12_500, ns=1),
        GenerateSample(decodes=6, context=2000, ns=1),
        GenerateSample(decodes=2, context=300, prefill=200, pairs=20_000, ns=1),
    ):
        assert predict(model, sample) == pytest.approx(predict(COSTS, sample), rel=0.02)
    assert model.encode_error is not None
    assert model.encode_error.p95 < 0.01
    assert model.shape is not None
    assert model.shape.context_tokens == 1024
    assert model.kv_tokens == 2048
    assert model.machine is not None
    runs = play(compared(model))
    for run in runs:
        assert run.real.finished == run.simulated.finished == run.requests
        assert run.slowness == {"encode": pytest.approx(1), "generate": pytest.approx(1)}
        assert run.missed(run.simulated) == []
