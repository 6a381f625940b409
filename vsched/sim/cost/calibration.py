"""Fit a cost model to an observation of a real engine.

Other work on the machine can only make measurements too long. So everything is measured in several
rounds, and only rounds about as fast as the best one count. Slowdown caused by the engine's own
concurrent work is separated by recording when each process was busy: step costs come from steps
that ran alone, and the cost of concurrency (`HostCost.contention`) from the others.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import ConfigError
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.policy.requests import pairs_of
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
from vsched.types import stage_of

Span = tuple[int, float]
"""Start and end in nanoseconds; the end is infinite for what lasts."""


class ObservedStep(msgspec.Struct, frozen=True, kw_only=True):
    """An observed step: its sizes, when it was decided, and when its result arrived.

    A step that `paused` was not running all the time; the steps run in the pauses are observed as
    well.
    """

    group: str
    sample: EncodeSample | GenerateSample
    decided_ns: int
    ended_ns: int
    paused: bool = False

    @property
    def start_ns(self) -> int:
        """When the ranks started it, or slightly later."""
        return self.ended_ns - int(self.sample.ns)


class ObservedJob(msgspec.Struct, frozen=True, array_like=True):
    """A period in which a thread of the engine processed a request's images."""

    start_ns: int
    end_ns: int


class ObservedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The preparation of a request, with no other request in preparation."""

    tokens: int
    images: int
    pixels: int
    received_ns: int
    submitted_ns: int


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything observed of an engine; `rounds_ns` holds the start of each round."""

    rounds_ns: list[int]
    steps: list[ObservedStep]
    jobs: list[ObservedJob]
    requests: list[ObservedRequest]

    def round_of(self, at_ns: int) -> int:
        """Return the number of the round that contains a time."""
        return bisect.bisect_right(self.rounds_ns, at_ns)


class Concurrency:
    """Number of busy groups over time; the engine's threads share a process and count as one."""

    def __init__(self, observation: Observation) -> None:
        groups: dict[str, list[Span]] = {}
        for step in observation.steps:
            if step.paused:
                continue
            groups.setdefault(step.group, []).append((step.start_ns, step.ended_ns))
        groups[""] = [(job.start_ns, job.end_ns) for job in observation.jobs]
        spans = [span for group in groups.values() for span in united(group)]
        changes = sorted(
            [(start_ns, 1) for start_ns, _ in spans] + [(end_ns, -1) for _, end_ns in spans]
        )
        self._times = np.array([at_ns for at_ns, _ in changes], dtype=float)
        counts = np.cumsum([change for _, change in changes])
        widths = np.diff(self._times)
        self.most = int(counts.max(initial=0))
        self._passed = [
            np.concatenate([[0.0], np.cumsum(widths * (counts[:-1] == count))])
            for count in range(self.most + 1)
        ]

    def within(self, start_ns: int, end_ns: int) -> npt.NDArray[np.float64]:
        """Return how long zero, one, two, ... groups were busy within a span, in nanoseconds."""
        ends = np.array([start_ns, end_ns], dtype=float)
        return np.array([np.diff(np.interp(ends, self._times, one))[0] for one in self._passed])


def united(spans: Iterable[Span]) -> list[Span]:
    """Return the union of these spans."""
    found: list[Span] = []
    for start_ns, end_ns in sorted(spans):
        if found and start_ns <= found[-1][1]:
            found[-1] = found[-1][0], max(end_ns, found[-1][1])
        else:
            found.append((start_ns, end_ns))
    return found


def began(steps: Iterable[ObservedStep]) -> Iterator[tuple[ObservedStep, int]]:
    """Yield steps with the earliest time their ranks could have started; skips the first step of each group."""
    before: dict[str, ObservedStep] = {}
    for step in steps:
        previous, before[step.group] = before.get(step.group), step
        if previous is not None and not step.paused:
            yield step, max(step.decided_ns, previous.ended_ns)


def is_work(sample: EncodeSample | GenerateSample) -> bool:
    """Return True if a step ran the model, False if all its requests had already ended."""
    if isinstance(sample, EncodeSample):
        return sample.items > 0
    return sample.decodes > 0 or sample.prefill > 0


def encode_sample(decision: EncodeDecision, ns: int) -> EncodeSample:
    """Return the contents of an encode step; copies of finished embeddings do not count."""
    tokens = [task.tokens for task in decision.tasks if not task.encoded]
    return EncodeSample(
        items=len(tokens),
        tokens=sum(tokens),
        pairs=sum(count * count for count in tokens),
        ns=ns,
    )


def generate_sample(
    decision: GenerateDecision, yielded: Sequence[int], lengths: dict[int, int], ns: int
) -> GenerateSample:
    """Return the contents of a generate step.

    `yielded` are the slots that yielded a token; `lengths`, the tokens of each slot, is updated from step to step.
    """
    for join in decision.joined:
        lengths[join.slot] = join.length
    prefill, pairs = 0, 0.0
    firsts = []
    for chunk in decision.chunks:
        count = chunk.stop - chunk.start
        prefill += count
        pairs += pairs_of(chunk.start, count)
        if chunk.stop == lengths[chunk.slot]:
            firsts.append(chunk.slot)
    decoded = [slot for slot in yielded if slot not in firsts]
    context = sum(lengths[slot] for slot in decoded)
    for slot in yielded:
        lengths[slot] += 1
    return GenerateSample(
        decodes=len(decoded), context=context, prefill=prefill, pairs=pairs, ns=ns
    )


ALONE = 0.95
"""A step ran alone if no other process was busy for this share of it."""
CONTENTION_S = 0.3
"""Minimum time that this many processes were busy together; with less, the slowdown of one process fewer applies."""
PACE_LEAST = 0.01
ROUND_LONGER = 1.05
"""Maximum typical step time of a usable round, as a multiple of the best round's."""
ODD = 1.5
"""Steps that take this multiple of the predicted time are outliers."""
CONTENTION_LEAST = 1.03
"""Smaller slowdowns are treated as noise."""
KIND_STEPS_MIN = 8
"""Minimum number of steps of one kind for an estimate of their spread."""
BUCKET = 1.2
"""Steps whose sizes differ by less than this factor are of the same kind."""
LEAST_NS = 1000
"""Lower bound on measured durations, because errors are relative."""
NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""


def calibrate(
    observation: Observation,
    *,
    name: str,
    source: str,
    cores: int = 0,
    partial: bool = False,
    **more: Any,
) -> CostModel:
    """Fit a model to an observation and record its errors.

    `cores` is the number of processes that can run at full speed; 0 means the largest number
    observed.
    With `partial`, encoder steps and preparations that were not observed cost nothing. `more` is passed to the model
    unchanged: shape, KV cache, machine.

    Raises:
        ConfigError: When a stage was not observed, or a reported time is impossible.
    """
    steps = [step for step in observation.steps if is_work(step.sample)]
    _check(steps)
    concurrency = Concurrency(observation)
    spans = {id(step): concurrency.within(step.start_ns, step.ended_ns) for step in steps}
    alone = [step for step in steps if spans[id(step)][:2].sum() >= ALONE * step.sample.ns]
    rounds = _undisturbed(observation, alone)
    quiet = [step for step in alone if observation.round_of(step.decided_ns) in rounds]
    kinds = list(_by_kind(quiet).values())
    model = fit(
        [_typical(kind).sample for kind in kinds],
        name=name,
        source=source,
        partial=partial,
        **more,
    )
    model = _scale(model, [step.sample for step in quiet])
    requests = [
        one for one in observation.requests if observation.round_of(one.received_ns) in rounds
    ]
    prepare: dict[str, Any] = {}
    prepare_error = None
    if requests or not partial:
        prepare, prepare_error = _prepare_cost(requests)
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
    """Return, by stage, the ratio of observed to predicted step times, for steps that ran alone.

    A stage that rarely ran alone gets the ratio of the other.
    """
    times: dict[str, list[tuple[float, float]]] = {"encode": [], "generate": []}
    for step, was_idle in _alone(observation):
        times[stage_of(step.group)].append(_compared(model, step, was_idle=was_idle))
    known = {stage: _factor(some) for stage, some in times.items() if len(some) >= KIND_STEPS_MIN}
    fallback = max(known.values(), default=1.0)
    return {stage: known.get(stage, fallback) for stage in times}


def rehearsed(model: CostModel, observation: Observation) -> CostModel:
    """Adjust a model to mixed steps, from an observation of ordinary requests.

    Steps that directly followed another show how much longer steps take than in a series of equal
    ones; the others show the cost of starting on idle ranks.
    """
    warm: list[tuple[float, float]] = []
    cold: list[tuple[float, float]] = []
    for step, was_idle in _alone(observation):
        (cold if was_idle else warm).append(_compared(model, step, was_idle=False))
    factor = _factor(warm) if len(warm) >= KIND_STEPS_MIN else 1.0
    extra = _factor(cold) / factor if len(cold) >= KIND_STEPS_MIN else 1.0
    host = msgspec.structs.replace(model.host, cold=max(extra, 1.0))
    return msgspec.structs.replace(slower(model, factor, factor), host=host)


def as_observed(model: CostModel, observation: Observation) -> CostModel:
    """Adjust a model to the total times of an observation, with all delays by other programs.

    A calibration leaves these delays out. Here the ranks stay as fast as they were, so that queues grow alike, and do
    not slow each other down again.
    """
    steps = [step for step in observation.steps if is_work(step.sample)]
    factors = []
    for stage in (EncodeSample, GenerateSample):
        times = [
            (step.sample.ns, predict(model, step.sample))
            for step in steps
            if isinstance(step.sample, stage)
        ]
        needed = sum(need for _, need in times)
        factors.append(sum(took for took, _ in times) / needed if needed else 1.0)
    model = slower(model, *factors)
    late: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for step, since_ns in began(steps):
        if isinstance(step.sample, GenerateSample):
            late_ns = max(step.ended_ns - since_ns - step.sample.ns, 0.0)
            late[since_ns == step.decided_ns].append((late_ns, predict(model, step.sample)))
    (idle_ns, cold_ns), (gap_ns, step_ns) = (_means(late[was_idle]) for was_idle in (True, False))
    # Two decisions in flight must not wait for ranks that wake up: only the first step after a pause does.
    decision_ns = min(idle_ns, step_ns + 2 * gap_ns) if step_ns else idle_ns
    cold = 1 + (idle_ns - decision_ns) / cold_ns if cold_ns else 1.0
    late_costs = {"gap_ns": gap_ns, "decision_ns": decision_ns, "cold": cold}
    host = msgspec.structs.replace(model.host, contention=(), **late_costs)
    return msgspec.structs.replace(model, host=host)


def _means(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the means of both sides; zeros without pairs."""
    one, other = (statistics.fmean(side) for side in zip(*pairs or [(0.0, 0.0)], strict=True))
    return one, other


def _alone(observation: Observation) -> Iterator[tuple[ObservedStep, bool]]:
    """Yield steps that ran almost alone, and whether their ranks were idle before."""
    concurrency = Concurrency(observation)
    for step, since_ns in began(observation.steps):
        within = concurrency.within(step.start_ns, step.ended_ns)
        if is_work(step.sample) and within[:2].sum() >= ALONE * step.sample.ns:
            yield step, since_ns == step.decided_ns


def _compared(model: CostModel, step: ObservedStep, *, was_idle: bool) -> tuple[float, float]:
    """Return the measured and the predicted time of a step."""
    return step.sample.ns, predict(model, step.sample) * (model.host.cold if was_idle else 1.0)


def predict(model: CostModel, sample: EncodeSample | GenerateSample) -> float:
    """Predicted time of a measured step."""
    if isinstance(sample, GenerateSample):
        return model.generate_ns(
            decodes=sample.decodes,
            context=sample.context,
            prefill=sample.prefill,
            pairs=sample.pairs,
        )
    return model.batch_ns(sample.items, sample.tokens, sample.pairs)


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
    """Key shared by steps of about the same size."""
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
    """Return the step with the median duration."""
    return sorted(kind, key=lambda step: step.sample.ns)[len(kind) // 2]


def _undisturbed(observation: Observation, steps: Sequence[ObservedStep]) -> set[int]:
    """Return the rounds whose median duration per kind is close to the best round's."""
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
    """Scale a model so that its total predicted time matches the measured total.

    The fit targets typical steps. Over a long series the mean counts, and it is larger.
    """
    factors = [
        _factor((one.ns, predict(model, one)) for one in samples if isinstance(one, kind))
        for kind in (EncodeSample, GenerateSample)
    ]
    return slower(model, *factors)


def slower(model: CostModel, encode: float, generate: float) -> CostModel:
    """Return the model with step costs of the two stages multiplied by these factors."""
    encoding, generating = (
        {name: cost * factor for name, cost in msgspec.structs.asdict(costs).items()}
        for costs, factor in ((model.encode, encode), (model.generate, generate))
    )
    return msgspec.structs.replace(
        model, encode=EncodeCost(**encoding), generate=GenerateCost(**generating)
    )


def _factor(times: Iterable[tuple[float, float]]) -> float:
    """Ratio of total measured to total expected time, without outliers, from pairs of the two."""
    kept = [(took_ns, need_ns) for took_ns, need_ns in times if took_ns < ODD * need_ns]
    return sum(took for took, _ in kept) / sum(need for _, need in kept) if kept else 1.0


def _noise(kinds: Sequence[Sequence[ObservedStep]]) -> float:
    """Relative standard deviation of step times within a kind, estimated robustly."""
    away = [
        abs(step.sample.ns / _typical(kind).sample.ns - 1)
        for kind in kinds
        if len(kind) >= KIND_STEPS_MIN
        for step in kind
    ]
    return min(NORMAL_MAD * statistics.median(away), 1.0) if away else 0.0


def _error(
    model: CostModel, samples: Sequence[EncodeSample | GenerateSample], stage: type
) -> FitError | None:
    """Return the errors of a model over all steps of a stage, including disturbed rounds; None without steps."""
    errors = [abs(predict(model, one) / one.ns - 1) for one in samples if isinstance(one, stage)]
    return FitError.of(np.array(errors)) if errors else None


# --- the engine, and contention ---


def _prepare_cost(requests: Sequence[ObservedRequest]) -> tuple[dict[str, float], FitError]:
    """Return the cost of request preparation, by field of `HostCost`."""
    # Threads process several images at a time, so the total is not the sum over images.
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
    """Return the mean step overhead beyond its work, for idle and for busy ranks."""
    idle: list[float] = []
    busy: list[float] = []
    for step, since_ns in began(steps):
        if not concurrency.within(since_ns, step.ended_ns)[2:].sum():
            late_ns = max(step.ended_ns - since_ns - step.sample.ns, 0.0)
            (idle if since_ns == step.decided_ns else busy).append(late_ns)
    return _middle(idle), _middle(busy)


def _middle(values: Sequence[float]) -> float:
    """Trimmed mean: without the lowest and highest tenth."""
    cut = len(values) // 10
    middle = sorted(values)[cut : len(values) - cut]
    return statistics.fmean(middle) if middle else 0.0


def _contention(
    model: CostModel, contended: Sequence[tuple[ObservedStep, npt.NDArray[np.float64]]], cores: int
) -> tuple[float, ...]:
    """Return the slowdown by number of busy processes; empty if there is none.

    While `k` processes are busy, each progresses at some pace. The time a step needs alone is the
    sum over `k` of pace times duration, which is linear in the paces. More processes than cores
    take turns, as in `Contention`, so their time counts proportionally as time on a full machine.
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
    # Weight steps so that a second of a long step counts like a second of a short one.
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
