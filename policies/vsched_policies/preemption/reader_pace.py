"""Preempt the request that is furthest ahead of its reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from vsched.policy import Count, Preemption, PreemptionMode, PreemptionView, RequestPolicy


class ReaderPace(RequestPolicy, frozen=True, kw_only=True):
    """Preempts the request whose tokens are furthest ahead of its reader.

    A reader expects the first token after `first_ms` and then `tokens_s` per second. A request that
    is ahead leaves its reader something to read while it is preempted; one that is behind would
    keep its reader waiting even longer. Ties go to the youngest.

    Source: Liu et al., Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text
    Streaming Services, arXiv 2404.16283, 2024, whose scheduler compares the gain of serving a
    request with the memory it holds.

    Attributes:
        tokens_s: Reading speed in tokens per second.
        first_ms: Expected time to first token, from arrival.
    """

    tokens_s: Annotated[float, Meta(gt=0)] = 8.0
    first_ms: Count = 1000
    mode: PreemptionMode = "recompute"

    def needs(self) -> Sequence[str]:
        """Return `swap` if it swaps."""
        return ("swap",) if self.mode == "swap" else ()

    def victim(self, view: PreemptionView) -> Preemption:
        """Return the last eligible request with the longest lead."""

        def lead(index: int) -> tuple[float, int]:
            one = view.running[index]
            reading_s = max(view.now_ns - one.arrived_ns - self.first_ms * 1_000_000, 0) / 1e9
            return one.outputs - reading_s * self.tokens_s, index

        return Preemption(max(view.eligible, key=lead), self.mode)
