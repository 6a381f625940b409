"""Timelines of the latest requests, and histograms over all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any

from vsched.aio.streams.table import RequestTimeline
from vsched.types import FinishReason

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
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def statistics(self) -> dict[str, Any]:
        """Return bounds, counts and the sum of the values."""
        return {"bounds": self.bounds, "counts": self.counts, "sum": round(self.sum, 6)}


class FinishedRequests:
    """The latest timelines, oldest first; the histograms cover requests that ended with `stop` or `length`."""

    def __init__(self) -> None:
        self.recent: deque[RequestTimeline] = deque(maxlen=RECENT_MAX)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}

    def add(self, timeline: RequestTimeline) -> None:
        """Add an ended request."""
        self.recent.append(timeline)
        if timeline.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        for name, (field, _) in HISTOGRAMS.items():
            value = getattr(timeline, field)
            self._histograms[name].observe(value / 1e3 if field.endswith("_ms") else value)

    def histograms(self) -> dict[str, dict[str, Any]]:
        """Return the histograms by name."""
        return {name: one.statistics() for name, one in self._histograms.items()}
