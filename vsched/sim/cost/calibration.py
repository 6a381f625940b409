"""From what a real engine was seen doing to a cost model that a simulation can use.

Measurements on a machine that does other things too are wrong in one direction only: too long. So everything is
measured in several rounds, and only those count that are hardly slower than the best. What slows steps down because the
engine itself has other work at that moment is told apart by when each process was at work: the costs of steps come from
those that were alone, and how much company costs (`HostCost.contention`) from the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import ConfigError
from vsched.sim.cost.model import (
    CostModel,
    EncodeCost,
    EncodeSample,
    FitError,
    GenerateCost,
    GenerateSample,
    HostCost,
    fit,
    fit_linear,
    non_negative,
)
from vsched.sim.cost.observations import (
    Concurrency,
    Observation,
    ObservedRequest,
    ObservedStep,
    began,
    is_work,
)
from vsched.types import stage_of

ALONE = 0.95
"""A step was alone if no other process was at work for this share of it."""
CONTENTION_S = 0.3
"""That many processes must have been at work together for this long, or their speed is that of one fewer."""
PACE_LEAST = 0.01
ROUND_LONGER = 1.05
"""Rounds count in which steps typically take at most this multiple of their time in the best round."""
ODD = 1.5
"""A step that takes this multiple of the expected time was disturbed by something else than the model."""
CONTENTION_LEAST = 1.03
"""Less than this is not told from noise."""
KIND_STEPS_MIN = 8
"""Steps of one kind that tell how much their times differ."""
BUCKET = 1.2
"""Steps whose sizes differ by less than this factor are of the same kind."""
LEAST_NS = 1000
"""What takes less is taken to take so long, because errors are relative."""
NORMAL_MAD = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""


def calibrate(
    observation: Observation, *, name: str, source: str, cores: int = 0, **more: Any
) -> CostModel:
    """Return the model that fits what was seen best, with how far it is from it.

    `cores` is how many processes can be at work without taking turns; 0 for as many as ever were. `more` goes to the
    model as it is: the shape, the KV cache, the machine.

    Raises:
        ConfigError: When a part was not seen, or cannot have been as it was reported.
    """
    steps = [step for step in observation.steps if is_work(step.sample)]
    _check(steps)
    concurrency = Concurrency(observation)
    spans = {id(step): concurrency.within(step.start_ns, step.ended_ns) for step in steps}
    alone = [step for step in steps if spans[id(step)][:2].sum() >= ALONE * step.sample.ns]
    rounds = _undisturbed(observation, alone)
    quiet = [step for step in alone if observation.round_of(step.decided_ns) in rounds]
    kinds = list(_by_kind(quiet).values())
    model = fit([_typical(kind).sample for kind in kinds], name=name, source=source, **more)
    model = _scale(model, [step.sample for step in quiet])
    prepare, prepare_error = _prepare_cost(
        [one for one in observation.requests if observation.round_of(one.received_ns) in rounds]
    )
    of_rounds = [step for step in steps if observation.round_of(step.decided_ns) in rounds]
    decision_ns, gap_ns = _latencies(of_rounds, concurrency)
    contended = [(step, spans[id(step)]) for step in of_rounds if spans[id(step)][2:].sum() > 0]
    return msgspec.structs.replace(
        model,
        host=HostCost(
            decision_ns=decision_ns,
            gap_ns=gap_ns,
            contention=_contention(model, contended, cores or concurrency.most),
            **prepare,
        ),
        noise=_noise(kinds),
        encode_error=_error(model, [step.sample for step in alone], EncodeSample),
        generate_error=_error(model, [step.sample for step in alone], GenerateSample),
        prepare_error=prepare_error,
    )


def slowness(model: CostModel, observation: Observation) -> dict[str, float]:
    """Return by stage how many times as long steps took, of those that were alone, as a model says.

    Of a stage that was hardly ever alone, it is that of the other.
    """
    times: dict[str, list[tuple[float, float]]] = {"encode": [], "generate": []}
    for step, was_idle in _alone(observation):
        times[stage_of(step.group)].append(_compared(model, step, was_idle=was_idle))
    known = {stage: _factor(some) for stage, some in times.items() if len(some) >= KIND_STEPS_MIN}
    fallback = max(known.values(), default=1.0)
    return {stage: known.get(stage, fallback) for stage in times}


def rehearsed(model: CostModel, observation: Observation) -> CostModel:
    """Return a model that fits steps among others of other kinds, by an observation of ordinary requests.

    Those that followed another step tell how much longer steps take than in a row of their own; the others tell what
    it costs that ranks had nothing to do before.
    """
    warm: list[tuple[float, float]] = []
    cold: list[tuple[float, float]] = []
    for step, was_idle in _alone(observation):
        (cold if was_idle else warm).append(_compared(model, step, was_idle=False))
    factor = _factor(warm) if len(warm) >= KIND_STEPS_MIN else 1.0
    extra = _factor(cold) / factor if len(cold) >= KIND_STEPS_MIN else 1.0
    host = msgspec.structs.replace(model.host, cold=max(extra, 1.0))
    return msgspec.structs.replace(slower(model, factor, factor), host=host)


def _alone(observation: Observation) -> Iterator[tuple[ObservedStep, bool]]:
    """Return the steps beside which hardly anything was at work, and whether their ranks were idle before."""
    concurrency = Concurrency(observation)
    for step, since_ns in began(observation.steps):
        within = concurrency.within(step.start_ns, step.ended_ns)
        if is_work(step.sample) and within[:2].sum() >= ALONE * step.sample.ns:
            yield step, since_ns == step.decided_ns


def _compared(model: CostModel, step: ObservedStep, *, was_idle: bool) -> tuple[float, float]:
    """Return the time of a step, and what a model says."""
    return step.sample.ns, predict(model, step.sample) * (model.host.cold if was_idle else 1.0)


def predict(model: CostModel, sample: EncodeSample | GenerateSample) -> float:
    """Return the time that a model gives a step that was measured."""
    if isinstance(sample, GenerateSample):
        return model.generate_ns(
            decodes=sample.decodes,
            context=sample.context,
            prefill=sample.prefill,
            pairs=sample.pairs,
        )
    cost = model.encode
    return (
        cost.step_ns
        + cost.item_ns * sample.items
        + cost.token_ns * sample.tokens
        + cost.token_pair_ns * sample.pairs
    )


def _check(steps: Sequence[ObservedStep]) -> None:
    for step in steps:
        took_ns = step.ended_ns - step.decided_ns
        if not 0 < step.sample.ns <= took_ns:
            raise ConfigError(
                f"{step.group}: a step of {step.sample.ns:g} ns that ended {took_ns} ns after it was decided. "
                "Remedy: measure with ranks that report how long they worked"
            )


# --- steps of a kind, and rounds ---


def _kind(sample: EncodeSample | GenerateSample) -> Hashable:
    """Return what steps of about the same size have in common."""
    if isinstance(sample, EncodeSample):
        return sample.items, sample.tokens, sample.pairs
    sizes = (sample.context, sample.prefill, sample.pairs)
    return sample.decodes, *(round(math.log1p(size) / math.log(BUCKET)) for size in sizes)


def _by_kind(steps: Sequence[ObservedStep]) -> dict[Hashable, list[ObservedStep]]:
    kinds: dict[Hashable, list[ObservedStep]] = {}
    for step in steps:
        kinds.setdefault(_kind(step.sample), []).append(step)
    return kinds


def _typical(kind: Sequence[ObservedStep]) -> ObservedStep:
    """Return the step that took the median time."""
    return sorted(kind, key=lambda step: step.sample.ns)[len(kind) // 2]


def _undisturbed(observation: Observation, steps: Sequence[ObservedStep]) -> set[int]:
    """Return the rounds in which steps took hardly longer than in the best one, by what is typical of each kind."""
    longer: dict[int, list[float]] = {}
    for kind in _by_kind(steps).values():
        of_rounds: dict[int, list[ObservedStep]] = {}
        for step in kind:
            of_rounds.setdefault(observation.round_of(step.decided_ns), []).append(step)
        times = {number: _typical(some).sample.ns for number, some in of_rounds.items()}
        for number, took_ns in times.items():
            longer.setdefault(number, []).append(took_ns / min(times.values()))
    slowness = {number: statistics.median(ratios) for number, ratios in longer.items()}
    best = min(slowness.values(), default=1.0)
    return {number for number, one in slowness.items() if one <= best * ROUND_LONGER}


def _scale(model: CostModel, samples: Sequence[EncodeSample | GenerateSample]) -> CostModel:
    """Return a model by which all these steps together take the time that they did.

    What is typical was fitted. Where many steps follow each other, it is the mean that counts, which is longer.
    """
    factors = [
        _factor((one.ns, predict(model, one)) for one in samples if isinstance(one, kind))
        for kind in (EncodeSample, GenerateSample)
    ]
    return slower(model, *factors)


def slower(model: CostModel, encode: float, generate: float) -> CostModel:
    """Return a model by which the steps of the two stages take these multiples of their time."""
    encoding, generating = (
        {name: cost * factor for name, cost in msgspec.structs.asdict(costs).items()}
        for costs, factor in ((model.encode, encode), (model.generate, generate))
    )
    return msgspec.structs.replace(
        model, encode=EncodeCost(**encoding), generate=GenerateCost(**generating)
    )


def _factor(times: Iterable[tuple[float, float]]) -> float:
    """Return how much longer all takes than it should; given are the time of each, and what it should be."""
    kept = [(took_ns, need_ns) for took_ns, need_ns in times if took_ns < ODD * need_ns]
    return sum(took for took, _ in kept) / sum(need for _, need in kept) if kept else 1.0


def _noise(kinds: Sequence[Sequence[ObservedStep]]) -> float:
    """Return how much the times of steps of one kind differ: a relative standard deviation, but for outliers."""
    away = [
        abs(step.sample.ns / _typical(kind).sample.ns - 1)
        for kind in kinds
        if len(kind) >= KIND_STEPS_MIN
        for step in kind
    ]
    return min(NORMAL_MAD * statistics.median(away), 1.0) if away else 0.0


def _error(
    model: CostModel, samples: Sequence[EncodeSample | GenerateSample], stage: type
) -> FitError:
    """Return how far a model is from all steps of a stage, those of disturbed rounds included."""
    errors = [abs(predict(model, one) / one.ns - 1) for one in samples if isinstance(one, stage)]
    median, p95 = np.percentile(errors, [50, 95])
    return FitError(samples=len(errors), median=float(median), p95=float(p95))


# --- the engine, and company ---


def _prepare_cost(requests: Sequence[ObservedRequest]) -> tuple[dict[str, float], FitError]:
    """Return what preparing requests costs, by the names of `HostCost`."""
    # Threads prepare several images at a time: that is not the sum of what each of them takes.
    single = [one for one in requests if one.images <= 1]
    if not single:
        raise ConfigError("no request was seen being prepared. Remedy: measure some")
    rows = np.array([(1.0, one.tokens, one.images, one.pixels) for one in single])
    times = [max(one.submitted_ns - one.received_ns, LEAST_NS) for one in single]
    found, error = fit_linear(rows.tolist(), times)
    factor = _factor(zip(times, (rows @ found).tolist(), strict=True))
    names = ("request_ns", "token_ns", "image_ns", "pixel_ns")
    return {name: one * factor for name, one in zip(names, found, strict=True)}, error


def _latencies(steps: Sequence[ObservedStep], concurrency: Concurrency) -> tuple[float, float]:
    """Return the time that a step takes beyond its work: on ranks that were idle, and on those that were not."""
    idle: list[float] = []
    busy: list[float] = []
    for step, since_ns in began(steps):
        if not concurrency.within(since_ns, step.ended_ns)[2:].sum():
            late_ns = max(step.ended_ns - since_ns - step.sample.ns, 0.0)
            (idle if since_ns == step.decided_ns else busy).append(late_ns)
    return _middle(idle), _middle(busy)


def _middle(values: Sequence[float]) -> float:
    """Return the mean of what lies between the tenth of the least and the tenth of the largest."""
    cut = len(values) // 10
    middle = sorted(values)[cut : len(values) - cut]
    return statistics.fmean(middle) if middle else 0.0


def _contention(
    model: CostModel, contended: Sequence[tuple[ObservedStep, npt.NDArray[np.float64]]], cores: int
) -> tuple[float, ...]:
    """Return how many times as long work takes by the number of those at work; empty where it makes no difference.

    While `k` are at work, each gets on at some pace. What a step needs alone is the sum, over all `k`, of its pace and
    how long that was so, multiplied: which is linear in the paces. More than there are cores take turns, as with
    `Contention`, so their time counts for that of a full machine, in proportion.
    """
    if not contended:
        return ()
    needed = np.array([predict(model, step.sample) for step, _ in contended])
    within = np.array([one for _, one in contended])
    took = within.sum(axis=1)
    most = within.shape[1] - 1
    for count in range(cores + 1, most + 1):
        within[:, cores] += within[:, count] * cores / count
    within = within[:, : cores + 1]
    seen = within[:, 2:].sum(axis=0) >= CONTENTION_S * 1e9
    # A second of a long step counts as much as one of a short step.
    weights = 1 / np.sqrt(took)
    paces = non_negative(
        within[:, 2:][:, seen] * weights[:, None], (needed - within[:, :2].sum(axis=1)) * weights
    )
    contention = [1.0]
    found = iter(paces.tolist())
    for was_seen in seen.tolist():
        slowdown = 1 / max(next(found), PACE_LEAST) if was_seen else 1.0
        contention.append(max(contention[-1], slowdown))
    return tuple(contention) if contention[-1] > CONTENTION_LEAST or cores < most else ()
