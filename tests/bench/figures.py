"""From samples to figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tests.bench.records import Figures, Times
from vsched.bench.load.client import Sample

ERRORS_MAX = 5
NOT_ASKED = "not asked: an earlier turn failed"


@dataclass(kw_only=True)
class Answers:
    """What one run brought, before it is summarised.

    Attributes:
        samples: Of all requests.
        tokens: How many each was to be, in the same order.
        decoders: The places of the requests that ran while a burst was answered; empty for other cases.
        burst: When the burst began and ended, on the clock of the samples.
    """

    samples: list[Sample] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    decoders: range = range(0)
    burst: tuple[float, float] = (0.0, 0.0)
    wall_s: float = 0.0
    cpu_s: float = 0.0


def times(seconds: Iterable[float]) -> Times | None:
    """Summarise times; None when there are none."""
    values = np.fromiter(seconds, dtype=float) * 1e3
    if not values.size:
        return None
    p50, p95, p99 = (round(float(value), 3) for value in np.percentile(values, [50, 95, 99]))
    return Times(p50=p50, p95=p95, p99=p99, worst=round(float(values.max()), 3))


def gaps(samples: Iterable[Sample], window: tuple[float, float] | None) -> list[float]:
    """Return the times between two pieces of text, of those that touch the window if there is one."""
    return [
        after - before
        for sample in samples
        for before, after in pairwise(sample.stamps)
        if window is None or (after > window[0] and before < window[1])
    ]


def _per_token(samples: Iterable[Sample]) -> list[float]:
    return [
        (sample.stamps[-1] - sample.stamps[0]) / (sample.output_tokens - 1)
        for sample in samples
        if sample.stamps and sample.output_tokens > 1
    ]


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / max(len(values), 1), 2)


def summarise(answers: Answers) -> Figures:
    """Summarise one run. A request that failed is in no time and no rate, but is counted and its error kept."""
    good = [sample for sample in answers.samples if sample.error is None]
    errors = Counter(sample.error for sample in answers.samples if sample.error is not None)
    wrong = [
        sample
        for sample, tokens in zip(answers.samples, answers.tokens, strict=True)
        if sample.error is None and sample.output_tokens != tokens
    ]
    first, streams, window = good, good, None
    if answers.decoders:
        decoders = {id(answers.samples[index]) for index in answers.decoders}
        first = [sample for sample in good if id(sample) not in decoders]
        streams = [sample for sample in good if id(sample) in decoders]
        window = answers.burst
    wall_s = max(answers.wall_s, 1e-9)
    return Figures(
        requests=len(answers.samples),
        failed=errors.total(),
        errors=[f"{count} x {text}" for text, count in errors.most_common(ERRORS_MAX)],
        wrong_length=len(wrong),
        wall_s=round(wall_s, 4),
        requests_s=round(len(good) / wall_s, 4),
        output_tokens_s=round(sum(sample.output_tokens for sample in good) / wall_s, 2),
        prompt_tokens_mean=_mean([sample.prompt_tokens for sample in good]),
        output_tokens_mean=_mean([sample.output_tokens for sample in good]),
        pieces_mean=_mean([len(sample.stamps) for sample in good]),
        ttft_ms=times(sample.stamps[0] - sample.started for sample in first if sample.stamps),
        itl_ms=times(gaps(streams, window)),
        tpot_ms=times(_per_token(streams)),
        request_ms=times(sample.ended - sample.started for sample in good),
        client_cpu=round(answers.cpu_s / wall_s, 3),
    )
