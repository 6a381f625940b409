"""The time for prefill follows what clients see: late first tokens ask for more, long gaps for less."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.policy import PositiveCount, StepPolicy, StepShares, StepView


class PrefillTime(msgspec.Struct):
    """How long prefill may take in a step, 0 before the first; and up to when steps and first tokens were looked at."""

    time_ns: float = 0.0
    steps_seen_ns: int = 0
    first_seen_ns: int = 0


class SloFeedback(StepPolicy, frozen=True, kw_only=True):
    """Moves the time that prefill may take in a step by feedback from TTFT and ITL.

    Every step that kept decoding requests waiting longer than `itl_target_ms` takes a part of the time away. A first
    token later than its target (the request's own, or `ttft_target_ms`) adds a part, as long as gaps are not too long.
    ITL goes first where both cannot be met. Requests advance in order of arrival.

    Attributes:
        itl_target_ms: Longest time between two tokens of a request.
        ttft_target_ms: Time to first token of a request without a target of its own.
        least_ms: The least time for prefill, so that it never stops.
        most_ms: The most.
        gain: What one step or first token changes, as a part of the time.
    """

    state_type = PrefillTime
    itl_target_ms: PositiveCount = 50
    ttft_target_ms: PositiveCount = 1000
    least_ms: Annotated[float, Meta(gt=0)] = 1.0
    most_ms: Annotated[float, Meta(gt=0)] = 1000.0
    gain: Annotated[float, Meta(gt=0, lt=1)] = 0.1

    def share(self, view: StepView) -> StepShares:
        """Return all in order, and the time that prefill may take."""
        order = range(len(view.prefilling))
        state: PrefillTime = view.state
        if view.time_ns is None:
            return StepShares(order)  # nobody decodes, so nobody waits
        time_ns = state.time_ns or float(view.time_ns)
        itl_ns = self.itl_target_ms * 1e6
        long = False
        for step in view.measured.steps:
            if step.ended_ns > state.steps_seen_ns and step.decodes and step.prefill_tokens:
                state.steps_seen_ns = step.ended_ns
                long = step.gap_ns > itl_ns
                if long:
                    time_ns *= 1 - self.gain
        for first in view.measured.first_tokens:
            if first.ended_ns > state.first_seen_ns:
                state.first_seen_ns = first.ended_ns
                target_ns = first.target_ns
                if target_ns is None:
                    target_ns = first.ended_ns - first.ttft_ns + int(self.ttft_target_ms * 1e6)
                if first.ended_ns > target_ns and not long:
                    time_ns *= 1 + self.gain
        state.time_ns = min(max(time_ns, self.least_ms * 1e6), self.most_ms * 1e6)
        return StepShares(order, time_ns=int(state.time_ns))
