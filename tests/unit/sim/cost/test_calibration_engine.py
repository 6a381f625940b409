"""Calibration and comparison of an engine with known costs: simulated ranks, everything else real."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from tests.unit.sim.shapes import arrival
from tests.unit.sim.virtual import play
from vsched.bench.fidelity.calibration import measure
from vsched.bench.fidelity.measure import (
    FLOOD,
    LIMITS,
    Comparison,
    ObservedEngine,
    RequestTexts,
    Run,
    at_rate,
)
from vsched.config import Config
from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.cost.calibration import predict
from vsched.sim.cost.model import CostModel, EncodeCost, EncodeSample, GenerateCost, GenerateSample
from vsched.sim.workload.images import appearance_of, data_url, key_of
from vsched.sim.workload.requests import Arrival, Image, Text, Workload, workload_of
from vsched.sim.world import Delays, World
from vsched.worker.contract import Preprocessor

pytestmark = pytest.mark.slow
COSTS = CostModel(
    name="true",
    source="made up",
    encode=EncodeCost(step_ns=3e6, item_ns=5e5, token_ns=2e5, token_pair_ns=1600.0),
    generate=GenerateCost(
        step_ns=4e6, decode_ns=1e5, context_ns=3e3, prefill_ns=8e4, pair_ns=900.0
    ),
)
WORDS = " ".join(map(str, range(100, 200)))


def settings() -> Config:
    generate: dict[str, Any] = {"slots": 8, "max_batch_tokens": 512, "chunk_tokens": 256}
    generate |= {"context_tokens": 1024, "memory": {"use": "pinned", "tokens": 2048}}
    arena = {"pixel_bytes": 1 << 20, "embedding_bytes": 1 << 20}
    return small_config(generate=generate, arena=arena)


class SimulatedDresser(RequestTexts):
    """Draws pictures for simulated encoders."""

    def __init__(self, preprocessor: Preprocessor, world: World) -> None:
        super().__init__(preprocessor, words=WORDS)
        self._world = world

    def pictures(self, arrival: Arrival) -> list[str]:
        found = []
        for part in arrival.images:
            image = Image(arrival.key_of(part), part.tokens)
            self._world.appearances[key_of(image, arrival.salt)] = appearance_of(image)
            found.append(data_url(image))
        return found


@contextlib.asynccontextmanager
async def watched_engine() -> AsyncIterator[tuple[ObservedEngine, SimulatedDresser]]:
    """Start an engine whose ranks take the times of a cost model."""
    sim = SimEngine(settings(), costs=COSTS, delays=Delays(noise=0.0))
    engine = ObservedEngine(sim.config, environment=sim.engine._environment)
    sim.engine = engine
    async with engine:
        yield engine, SimulatedDresser(engine.preprocessor, sim.world)


def requests(count: int) -> Workload:
    rng = Random(7)
    arrivals = []
    for number in range(count):
        at_ms = number * 100 * rng.uniform(0.5, 1.5)
        images = [Image(f"{number}/{each}", rng.randint(8, 90)) for each in range(number % 3)]
        text = Text(number, rng.randint(10, 200))
        arrivals.append(arrival(number, at_ms, *images, text, outputs=rng.randint(2, 40)))
    return workload_of("mixed", arrivals)


async def calibrated(seconds: float = 8.0) -> tuple[CostModel, list[int]]:
    advances = []
    async with watched_engine() as (engine, texts):
        model = await measure(engine, texts, seconds, lambda done, _: advances.append(done))
    return model, advances


async def compared(model: CostModel) -> list[Run]:
    async with watched_engine() as (engine, texts):
        comparison = Comparison(engine, model, texts=texts)
        await comparison.warm_up(requests(40))
        flood = await comparison.compare_workload(comparison.flood_of(requests(40), 5), FLOOD)
        rate = 0.6 * flood.real.requests_s
        return [flood, await comparison.compare_workload(at_rate(requests(40), rate, 5), 0.6)]


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
        errors = run.errors(run.simulated)
        assert all(abs(error) <= LIMITS[name] for name, error in errors.items()), errors
