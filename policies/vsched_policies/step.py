"""Step policies: the prefilling requests that advance in a step, and their numbers of tokens."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.policy import PositiveCount, RequestPolicy, StepShares, StepView


class InOrder(RequestPolicy, frozen=True, kw_only=True):
    """Advances requests in order of arrival, each as far as the time and the free tokens of the step allow."""

    def share(self, view: StepView) -> StepShares:
        return StepShares(range(len(view.prefilling)))


class ResponseRatio(RequestPolicy, frozen=True, kw_only=True):
    """Advances the request with the highest response ratio first: its time since arrival over the time that it needs.

    A short prompt overtakes a long one soon, a long one overtakes short ones after a wait in
    proportion to its length, and equal prompts are completed one after the other. While requests
    wait for a slot, a share of the time is left to them, so that a short one joins next to a long
    one: time for two KV blocks at least, or the scheduler would begin none.

    Source: Brinch Hansen, Short-Term Scheduling in Multiprogramming Systems, SOSP 1971.

    Attributes:
        joining_share: Share of the time of prefill that is left to joining requests.
    """

    joining_share: Annotated[float, Meta(ge=0, lt=1)] = 0.3

    def share(self, view: StepView) -> StepShares:
        ratios = [
            (view.now_ns - one.arrived_ns) / max(view.prefill_ns(one, one.tokens), 1.0)
            for one in view.prefilling
        ]
        order = sorted(range(len(ratios)), key=ratios.__getitem__, reverse=True)
        if not view.waiting or view.time_ns is None:
            return StepShares(order)
        joining_ns = max(view.time_ns * self.joining_share, 2 * view.block_tokens * view.token_ns)
        left_ns, tokens = view.time_ns - joining_ns, list[int]()
        for one in [view.prefilling[index] for index in order]:
            count = view.tokens_within(one, left_ns)
            if not count:
                break
            tokens.append(count)
            left_ns -= view.prefill_ns(one, count)
        if not (tokens or view.decodes):  # one must advance
            return StepShares(order)
        return StepShares(order[: len(tokens)], tokens)


class PrefillTime(msgspec.Struct):
    """Time limit of prefill in a step, 0 before the first, and the end of the last steps and first tokens seen."""

    time_ns: float = 0.0
    steps_seen_ns: int = 0
    first_seen_ns: int = 0


class SloFeedback(RequestPolicy, frozen=True, kw_only=True):
    """Adjusts the time that prefill may take in a step by feedback from TTFT and ITL.

    Every step in which decoding requests waited longer than `itl_target_ms` reduces the time by a
    share. A first token later than its target (the request's own, or `ttft_target_ms`) increases it
    by a share, unless gaps are too long. ITL has precedence if both targets cannot be met. Requests
    advance in order of arrival. It has no effect if `generate.step_target_ms` is 0.

    Attributes:
        itl_target_ms: Maximum time between two tokens of a request.
        ttft_target_ms: TTFT target of a request without its own.
        least_ms: Minimum time for prefill, so that it never stops.
        most_ms: Maximum time for prefill.
        gain: Relative change by one step or first token.
    """

    state_type = PrefillTime
    itl_target_ms: PositiveCount = 50
    ttft_target_ms: PositiveCount = 1000
    least_ms: Annotated[float, Meta(gt=0)] = 1.0
    most_ms: Annotated[float, Meta(gt=0)] = 1000.0
    gain: Annotated[float, Meta(gt=0, lt=1)] = 0.1

    def share(self, view: StepView) -> StepShares:
        order = range(len(view.prefilling))
        state: PrefillTime = view.state
        if view.time_ns is None or not view.decodes:
            return StepShares(order)  # no request decodes, so none waits
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
