"""Whoever is ahead of its reader can pause."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from vsched.policy import Count, Manner, Preemption, PreemptionPolicy, PreemptionView


class ReaderPace(PreemptionPolicy, frozen=True, kw_only=True):
    """Preempts the request whose tokens are furthest ahead of what its reader can have read.

    A reader expects the first token after `first_ms` and then `tokens_s` a second. While a request that is ahead of it
    comes back, its reader has something to read; one that is behind would be kept waiting even longer. Of equals the
    youngest goes.

    Source: Liu et al., Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming Services,
    arXiv 2404.16283, 2024, whose scheduler compares what is gained by serving a request with what it holds.

    Attributes:
        tokens_s: Tokens that a reader takes in, a second.
        first_ms: When the first token is expected, after the arrival.
    """

    tokens_s: Annotated[float, Meta(gt=0)] = 8.0
    first_ms: Count = 1000
    manner: Manner = "recompute"

    def victim(self, view: PreemptionView) -> Preemption:
        """Return the last of those with the longest lead."""

        def lead(index: int) -> tuple[float, int]:
            one = view.running[index]
            reading_s = max(view.now_ns - one.arrived_ns - self.first_ms * 1_000_000, 0) / 1e9
            return one.outputs - reading_s * self.tokens_s, index

        return Preemption(max(range(len(view.running)), key=lead), self.manner)
