"""Observation of a real engine at work: steps, worker threads, and request preparation."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.policy_host.step_times import pairs_of
from vsched.sim.cost.model import EncodeSample, GenerateSample

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
