"""Calibration runs: make an engine do everything that a cost model has a figure for, and observe it.

The requests make steps of all kinds occur on their own: few and many decodes, with short and long
contexts; prompts of all lengths; images of all sizes, single and batched. Then everything runs at
once, which measures contention. All of it is repeated in several rounds (see
`vsched.sim.cost.calibration`).

Steps mixed with other kinds take longer than a series of equal ones, because of cache misses. So a
rehearsal comes last: requests as clients send them, at half of the engine's capacity.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vsched.aio.streams import Generation
from vsched.bench.fidelity.measure import (
    Comparison,
    ObservedEngine,
    RequestTexts,
    at_rate,
    small_requests,
)
from vsched.bench.machine import OtherLoad, describe_machine
from vsched.config import Config
from vsched.engine import Progress
from vsched.sim.cost.calibration import ObservedRequest, calibrate, rehearsed
from vsched.sim.cost.model import CostModel
from vsched.sim.workload.requests import Arrival, Image, Text

Advanced = Callable[[int, int], None]
ROUNDS = 5
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (32, 512, 2048, 8192)
DECODE_STEPS = 24
PROMPTS = (16, 48, 128, 300, 512, 1024, 2048, 4096, 8192)
IMAGES = (4, 16, 64, 144, 256, 576, 1024, 2048, 4096)
BATCHES = ((2, 64), (4, 64), (8, 16), (3, 256))
"""Number of images and tokens of each, for requests that fill a batch."""
KV_SHARE = 0.75
"""Share of the KV cache to use, so that nothing is preempted."""
CONTENTION_TOKENS_MIN = 64
"""Smaller images are encoded too fast to cause contention."""
CONTENTION_DECODES = (1, 8)
QUESTION = 8
"""Text tokens of a request with an image."""
STEP_TOKENS = 30
"""Tokens of prefill that take about as long as an empty step."""
ROUND_COST_MIN = 6000
"""Below this cost per round, there is too little data to separate the coefficients."""
WARM_UP = 3
FIRST_TEXT = 1 << 20
REHEARSAL_SHARE = 0.25
"""Share of the measuring time."""
REHEARSAL_LOAD = 0.5
REHEARSAL_REQUESTS = 4000
REHEARSAL_SEED = 4711
"""Seed of a workload used by no comparison."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request: text tokens, tokens of each image, output tokens."""

    text: int
    images: tuple[int, ...] = ()
    outputs: int = 1

    @property
    def prompt(self) -> int:
        """Tokens of the prompt, including separators of images."""
        return self.text + sum(self.images) + len(self.images)


@dataclass(frozen=True, slots=True)
class CalibrationTrial:
    """Requests sent at once or one after another, while others decode."""

    asks: tuple[PlannedRequest, ...]
    at_once: bool = True
    decoding: tuple[PlannedRequest, ...] = ()

    @property
    def cost(self) -> int:
        """Approximate cost in prompt tokens, including encoding and a cost per step."""
        asks = (*self.asks, *self.decoding)
        tokens = sum(ask.prompt + 2 * sum(ask.images) for ask in asks)
        return tokens + STEP_TOKENS * max(ask.outputs for ask in asks)


@dataclass(frozen=True, slots=True)
class CalibrationLimits:
    """Limits of an engine.

    Attributes:
        slots: Number of running requests.
        kv_tokens: Total tokens of running requests, prompts and outputs.
        context_tokens: Tokens of one request.
        item_tokens: Tokens of an image; 0 if images are not supported.
        pixel_tokens: Total tokens of all images in memory.
    """

    slots: int
    kv_tokens: int
    context_tokens: int
    item_tokens: int
    images: int
    pixel_tokens: int

    def fit(self, asks: Sequence[PlannedRequest]) -> bool:
        """Return True if these requests fit at once."""
        images = [tokens for ask in asks for tokens in ask.images]
        return (
            len(asks) <= self.slots
            and sum(ask.prompt + ask.outputs for ask in asks) <= self.kv_tokens * KV_SHARE
            and max(ask.prompt + ask.outputs for ask in asks) < self.context_tokens
            and max(images, default=0) <= self.item_tokens
            and max(len(ask.images) for ask in asks) <= self.images
            and sum(images) <= self.pixel_tokens
        )


def limits_of(engine: ObservedEngine, texts: RequestTexts) -> CalibrationLimits:
    """Return the limits of a started engine."""
    config, info = engine.config, engine.info
    generate = engine.statistics()["generate"]
    return CalibrationLimits(
        slots=generate["slots_total"],
        kv_tokens=generate["blocks_total"] * config.generate.block_size,
        context_tokens=info.context_tokens,
        item_tokens=info.item_tokens_max,
        images=config.media.images_max,
        pixel_tokens=config.arena.pixel_bytes // texts.bytes_per_token,
    )


def plan_round(limits: CalibrationLimits, cost_max: float) -> list[CalibrationTrial]:
    """Return the trials of a round, the cheapest first, up to a total cost."""
    trials = [
        CalibrationTrial((PlannedRequest(context, outputs=DECODE_STEPS),) * count)
        for count in DECODES
        for context in CONTEXTS
    ]
    trials += [CalibrationTrial((PlannedRequest(length),), at_once=False) for length in PROMPTS]
    trials += [
        CalibrationTrial((PlannedRequest(QUESTION, (tokens,)),) * 2, at_once=False)
        for tokens in IMAGES
    ]
    trials += [
        CalibrationTrial((PlannedRequest(QUESTION, (tokens,) * count),))
        for count, tokens in BATCHES
    ]
    chosen, spent = [], 0
    for trial in sorted(trials, key=lambda trial: trial.cost):
        if limits.fit(trial.asks):
            spent += trial.cost
            if spent > max(cost_max, ROUND_COST_MIN):
                break
            chosen.append(trial)
    return chosen + _plan_contention(limits, chosen)


def _plan_contention(
    limits: CalibrationLimits, chosen: Sequence[CalibrationTrial]
) -> list[CalibrationTrial]:
    """Return trials in which all images of the other trials are prepared and encoded while requests decode."""
    images = {ask.images for trial in chosen for ask in trial.asks if len(ask.images) == 1}
    asks = tuple(
        PlannedRequest(QUESTION, one) for one in sorted(images) if one[0] >= CONTENTION_TOKENS_MIN
    )
    most = min(limits.context_tokens, limits.kv_tokens // 2)
    trials = []
    for count in CONTENTION_DECODES:
        decoding = (PlannedRequest(QUESTION, outputs=most // count - 2 * QUESTION),) * count
        trials += [
            CalibrationTrial(asks, at_once=at_once, decoding=decoding) for at_once in (False, True)
        ]
    return [one for one in trials if one.asks and limits.fit((*one.asks, *one.decoding))]


class CalibrationDriver:
    """Sends requests to an observed engine.

    Attributes:
        requests: Observed preparations of requests that came alone.
    """

    def __init__(self, engine: ObservedEngine, texts: RequestTexts) -> None:
        self.requests: list[ObservedRequest] = []
        self._engine = engine
        self._dresser = texts
        self._numbers = itertools.count()

    async def run_trial(self, trial: CalibrationTrial) -> None:
        """Run a trial."""
        # before the trial, because it takes a while
        calls = [self._dress(ask) for ask in trial.asks]
        async with self._decoding(trial.decoding):
            if trial.at_once:
                await asyncio.gather(*(self._answer(call) for call in calls))
                return
            for ask, call in zip(trial.asks, calls, strict=True):
                received_ns = self._engine.watch.now_ns()
                generation = await self._answer(call)
                seen = ObservedRequest(
                    tokens=ask.prompt,
                    images=len(ask.images),
                    pixels=sum(map(self._dresser.pixels_of, ask.images)),
                    received_ns=received_ns,
                    submitted_ns=generation.times.submitted_ns,
                )
                if not trial.decoding:
                    self.requests.append(seen)

    @contextlib.asynccontextmanager
    async def _decoding(self, asks: Sequence[PlannedRequest]) -> AsyncIterator[None]:
        """Decode requests in the background within the context."""
        generations = [await self._engine.generate(**self._dress(ask)) for ask in asks]
        began = [asyncio.Event() for _ in generations]
        readers = [
            asyncio.create_task(_read(generation, event))
            for generation, event in zip(generations, began, strict=True)
        ]
        try:
            for event in began:
                await event.wait()
            yield
        finally:
            for generation in generations:
                generation.abort()
            await asyncio.gather(*readers)

    async def _answer(self, call: dict[str, Any]) -> Generation:
        generation = await self._engine.generate(**call)
        await _read(generation, asyncio.Event())
        return generation

    def _dress(self, ask: PlannedRequest) -> dict[str, Any]:
        """Return the arguments of `Engine.generate`; no two requests share content."""
        number = next(self._numbers)
        name = f"calibration {number}"
        images = [Image(f"{name} {index}", tokens) for index, tokens in enumerate(ask.images)]
        arrival = self._dresser.fit_arrival(
            Arrival(
                at_ns=0,
                request_id=name,
                prompt=(*images, Text(FIRST_TEXT + number, ask.text)),
                output_tokens=ask.outputs,
            )
        )
        return self._dresser.call(arrival, self._dresser.pictures(arrival))


async def _read(generation: Generation, began: asyncio.Event) -> None:
    try:
        async for _ in generation:
            began.set()
    finally:
        began.set()


async def run_calibration(
    config: Config, *, seconds: float, on_progress: Progress | None = None, advanced: Advanced
) -> CostModel:
    """Start an engine, measure it for about this time, and return the fitted cost model.

    `on_progress` reports loading, `advanced` is called with the number of finished trials and of
    all trials. The figures are valid only for this configuration and machine.

    Raises:
        ConfigError: When the observation does not determine a cost, for example without images.
        GroupLostError: When ranks were lost meanwhile.
    """
    async with ObservedEngine(config, on_progress=on_progress) as engine:
        return await measure(engine, RequestTexts(engine.preprocessor), seconds, advanced)


async def measure(
    engine: ObservedEngine, texts: RequestTexts, seconds: float, advanced: Advanced
) -> CostModel:
    """Do the same as `run_calibration` with a started, idle engine."""
    watch, limits, driver = engine.watch, limits_of(engine, texts), CalibrationDriver(engine, texts)
    per_second = 0.0
    for _ in range(WARM_UP):
        began_ns = watch.now_ns()
        warm_up = CalibrationTrial(
            (PlannedRequest(QUESTION, (min(64, limits.item_tokens),), 8),) * 2
        )
        await driver.run_trial(warm_up)
        per_second = max(per_second, warm_up.cost * 1e9 / (watch.now_ns() - began_ns + 1))
    rounds_s = seconds * (1 - REHEARSAL_SHARE)
    trials = plan_round(limits, rounds_s / ROUNDS * per_second)
    others = OtherLoad(lambda: engine.rank_pids)
    rounds_ns = []
    for round_number in range(ROUNDS):
        rounds_ns.append(watch.now_ns())
        for index, trial in enumerate(trials, 1):
            await driver.run_trial(trial)
            advanced(round_number * len(trials) + index, ROUNDS * len(trials))
    machine = describe_machine(others=others.cores())
    model = calibrate(
        watch.observation(rounds_ns, driver.requests),
        name=engine.model_name,
        source=f"measured at {machine.measured} on {machine.processor}, {machine.cores} cores",
        pixels_per_token=texts.pixels_per_token,
        bytes_per_token=texts.bytes_per_token,
        shape=msgspec.structs.replace(engine.info, path=""),
        kv_tokens=limits.kv_tokens,
        machine=machine,
        cores=machine.cores,
    )
    return await rehearse(engine, texts, model, seconds * REHEARSAL_SHARE)


async def rehearse(
    engine: ObservedEngine, texts: RequestTexts, model: CostModel, seconds: float
) -> CostModel:
    """Serve requests of all kinds; return the model with step costs scaled to the observation.

    The first half does not count, because new sizes are compiled then.
    """
    comparison = Comparison(engine, model, texts=texts)
    requests = small_requests(REHEARSAL_SEED, REHEARSAL_REQUESTS)
    load = at_rate(requests, REHEARSAL_LOAD * comparison.capacity_of(requests), seconds)
    counts_ns = engine.watch.now_ns() + int(seconds / 2 * 1e9)
    await comparison.compare_workload(load, REHEARSAL_LOAD)
    return rehearsed(model, engine.watch.observation([counts_ns], []))
