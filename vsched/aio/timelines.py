"""Timelines of ended requests, and histograms of their phases for the metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from vsched.aio.streams import ChoiceSink
from vsched.types import FinishReason


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one request in each phase, in milliseconds; `ended_ns` is of the kernel's clock."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    encoded_items: int
    preemptions: int
    preprocess_ms: float
    encode_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    finish_reason: str
    ended_ns: int = 0


def timeline_of(choice: ChoiceSink, preprocess_ms: float) -> RequestTimeline:
    """Return the timeline of an ended request."""
    times = choice.times

    def span_ms(start_ns: int, end_ns: int) -> float:
        return round((end_ns - start_ns) / 1e6, 3) if start_ns and end_ns else 0.0

    return RequestTimeline(
        request_id=choice.request_id,
        prompt_tokens=choice.prompt_tokens,
        cached_tokens=times.cached_tokens,
        output_tokens=choice.output_tokens,
        encoded_items=times.encoded_items,
        preemptions=times.preemptions,
        preprocess_ms=round(preprocess_ms, 3),
        encode_ms=span_ms(times.submitted_ns, times.items_ready_ns),
        queue_ms=span_ms(times.items_ready_ns, times.admitted_ns),
        prefill_ms=span_ms(times.admitted_ns, times.first_token_ns),
        decode_ms=span_ms(times.first_token_ns, times.finished_ns),
        finish_reason=(choice.reason or FinishReason.ERROR).value,
        ended_ns=times.finished_ns,
    )


RECENT_MAX = 64
_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 25000, 50000, 100000)
HISTOGRAMS = {
    "request_preprocess_time_seconds": ("preprocess_ms", _SECONDS),
    "request_encode_time_seconds": ("encode_ms", _SECONDS),
    "request_queue_time_seconds": ("queue_ms", _SECONDS),
    "request_prefill_time_seconds": ("prefill_ms", _SECONDS),
    "request_decode_time_seconds": ("decode_ms", _SECONDS),
    "request_prompt_tokens": ("prompt_tokens", _TOKENS),
    "request_generation_tokens": ("output_tokens", _TOKENS),
}
"""Names of the histograms: the field of a timeline, and the upper bounds of the buckets."""


class Histogram:
    """Counts of values by bucket; the last bucket has no bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def statistics(self) -> dict[str, Any]:
        return {"bounds": self.bounds, "counts": self.counts, "sum": round(self.sum, 6)}


class FinishedRequests:
    """The latest timelines, oldest first; the histograms cover requests that ended with `stop` or `length`."""

    def __init__(self) -> None:
        self.recent: deque[RequestTimeline] = deque(maxlen=RECENT_MAX)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}

    def add(self, timeline: RequestTimeline) -> None:
        self.recent.append(timeline)
        if timeline.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        for name, (field, _) in HISTOGRAMS.items():
            value = getattr(timeline, field)
            self._histograms[name].observe(value / 1e3 if field.endswith("_ms") else value)

    def histograms(self) -> dict[str, dict[str, Any]]:
        return {name: one.statistics() for name, one in self._histograms.items()}
