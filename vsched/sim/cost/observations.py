"""What was seen of a real engine at work: its steps, its threads, the requests that it prepared."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.sim.cost.model import EncodeSample, GenerateSample


class ObservedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a group: what it consisted of, when it was decided, and when its result was there.

    One that `paused` was not at work all the time; the steps in between are seen, too.
    """

    group: str
    sample: EncodeSample | GenerateSample
    decided_ns: int
    ended_ns: int
    paused: bool = False

    @property
    def start_ns(self) -> int:
        """When ranks began with it, or a little later."""
        return self.ended_ns - int(self.sample.ns)


class ObservedJob(msgspec.Struct, frozen=True, array_like=True):
    """A thread of the engine was at work on a request's images."""

    start_ns: int
    end_ns: int


class ObservedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The preparation of a request, during which there was no other."""

    tokens: int
    images: int
    pixels: int
    received_ns: int
    submitted_ns: int


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """All that was seen of an engine; `rounds_ns` is when each round began."""

    rounds_ns: list[int]
    steps: list[ObservedStep]
    jobs: list[ObservedJob]
    requests: list[ObservedRequest]

    def round_of(self, at_ns: int) -> int:
        """Return the number of the round that a time lies in."""
        return bisect.bisect_right(self.rounds_ns, at_ns)


class Concurrency:
    """How many groups were at work, at any time; the engine's threads, which share a process, count as one."""

    def __init__(self, observation: Observation) -> None:
        groups: dict[str, list[tuple[int, int]]] = {}
        for step in observation.steps:
            if step.paused:
                continue
            groups.setdefault(step.group, []).append((step.start_ns, step.ended_ns))
        groups[""] = [(job.start_ns, job.end_ns) for job in observation.jobs]
        spans = [span for group in groups.values() for span in _united(group)]
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
        """Return for how many nanoseconds of a span none, one, two and more were at work."""
        ends = np.array([start_ns, end_ns], dtype=float)
        return np.array([np.diff(np.interp(ends, self._times, one))[0] for one in self._passed])


def _united(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the times in which there is one of these spans at least."""
    united: list[tuple[int, int]] = []
    for start_ns, end_ns in sorted(spans):
        if united and start_ns <= united[-1][1]:
            united[-1] = united[-1][0], max(end_ns, united[-1][1])
        else:
            united.append((start_ns, end_ns))
    return united


def began(steps: Iterable[ObservedStep]) -> Iterator[tuple[ObservedStep, int]]:
    """Return steps and since when their ranks could have been at work; the first step of a group tells nothing."""
    before: dict[str, ObservedStep] = {}
    for step in steps:
        previous, before[step.group] = before.get(step.group), step
        if previous is not None and not step.paused:
            yield step, max(step.decided_ns, previous.ended_ns)


def is_work(sample: EncodeSample | GenerateSample) -> bool:
    """Return whether a step ran the model: not if all its requests had ended in the one before, say."""
    if isinstance(sample, EncodeSample):
        return sample.items > 0
    return sample.decodes > 0 or sample.prefill > 0
