"""Step policies: the prefilling requests that advance in a step, and their numbers of tokens."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.policy import PositiveCount, RequestPolicy, StepShares, StepView

MARGIN = 1.25
"""Margin on the estimated time of the smallest chunk."""

OVERTAKEN = 0.7
"""Maximum remaining time of a prompt that goes ahead of the oldest, as a share of the oldest prompt's."""


class InOrder(RequestPolicy, frozen=True, kw_only=True):
    """Advances requests in order of arrival, each as far as the time and the free tokens of the step allow."""

    def share(self, view: StepView) -> StepShares:
        return StepShares(range(len(view.prefilling)))


class ShortestRemaining(RequestPolicy, frozen=True, kw_only=True):
    """Advances the prompt with the shortest remaining time first, next to shares for the oldest and for joining ones.

    A short prompt overtakes a long one, and similar ones are completed one after the other. The
    oldest prompt advances in each step, so short ones starve none. While requests wait for a slot,
    they get a share, since they may be short. There are no shares without a time limit
    (`generate.step_target_ms`, `generate.prefill_target_ms`).

    Source: Schrage, A Proof of the Optimality of the Shortest Remaining Processing Time Discipline,
    Operations Research, 1968.

    Attributes:
        oldest_share: Share for the oldest prompt, of the time and tokens that `joining_share` leaves; at least the
            smallest chunk.
        joining_share: Share for joining requests; at least the time of the smallest chunk.
    """

    oldest_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    joining_share: Annotated[float, Meta(ge=0, lt=1)] = 0.3

    def share(self, view: StepView) -> StepShares:
        prompts = view.prefilling
        if not prompts:
            return StepShares(())
        if view.overdue:
            return StepShares([*dict.fromkeys((*view.overdue, *range(len(prompts))))])
        remaining_ns = [view.prefill_ns(one, one.tokens) for one in prompts]
        lengths = [OVERTAKEN * remaining_ns[0], *remaining_ns[1:]]
        order = sorted(range(len(prompts)), key=lengths.__getitem__)
        if view.time_ns is None or not (view.decodes or view.waiting or order[0]):
            # The scheduler keeps to the time, but for a slightly longer last chunk.
            return StepShares(order)
        left_ns, free = float(view.time_ns), float(view.tokens_free)
        if view.waiting:
            left_ns -= max(left_ns * self.joining_share, MARGIN * view.chunk_min * view.token_ns)
            free *= 1 - self.joining_share
        chunk_ns = MARGIN * view.prefill_ns(prompts[0], view.chunk_min)
        kept_ns = min(remaining_ns[0], max(left_ns * self.oldest_share, chunk_ns))
        kept = min(prompts[0].tokens, free * self.oldest_share)
        tokens = []
        for index in order:
            if not index:
                kept_ns = kept = 0.0
            fitting = view.tokens_within(prompts[index], left_ns - kept_ns)
            tokens.append(max(min(fitting, int(free - kept)), 0))
            left_ns -= view.prefill_ns(prompts[index], tokens[-1])
            free -= tokens[-1]
        if not any(tokens):  # the scheduler lets the first advance by its smallest chunk
            return StepShares(range(len(prompts)))
        return StepShares(order, tokens)


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
