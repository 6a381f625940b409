"""Drafts are tried, and go on while they bring more than they cost; what policies share that guess the next tokens."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vsched.measured import StepTime
from vsched.policy import DRAFT_TOKENS_MAX, Draft, DraftingPolicy, DraftingView, PositiveCount

STEPS_BACK = 8
"""How many steps an average reaches back, about."""
HELD_UP = 2.0
"""A step that took more than so many times the average was held up by something else, and counts as just that."""
SKIPPED_MAX = 8
"""Where no drafts pay, at least every so many-th request tries some."""


class Average(msgspec.Struct):
    """An average of the latest values; 0 before the first."""

    value: float = 0.0
    count: int = 0

    def take(self, value: float) -> None:
        """Take a value."""
        self.count = min(self.count + 1, STEPS_BACK)
        self.value += (value - self.value) / self.count

    def take_time(self, took_ns: float) -> None:
        """Take what a step took.

        Other programs can only make a step longer, so a much shorter one counts for more: after a slow stretch of the
        machine, the few steps of one trial show that drafts pay again.
        """
        self.take(min(took_ns, HELD_UP * self.value) if self.count else took_ns)
        self.value = min(self.value, HELD_UP * took_ns)


class StepKind(msgspec.Struct):
    """What steps of one size take, without drafts and with, and what those with drafts bring.

    Attributes:
        plain_ns: Without drafts, for each request that decodes.
        drafted_ns: With drafts, likewise.
        tokens: Tokens of each request in a step with drafts.
    """

    plain_ns: Average = msgspec.field(default_factory=Average)
    drafted_ns: Average = msgspec.field(default_factory=Average)
    tokens: Average = msgspec.field(default_factory=Average)


class Trials(msgspec.Struct):
    """What is remembered.

    Attributes:
        seen_ns: Up to when steps were looked at.
        kinds: By the number of requests that decode, as a power of two.
        failed: Trials in a row that did not pay, of all requests.
        skipped: Requests since then that did not try.
    """

    seen_ns: int = 0
    kinds: dict[int, StepKind] = {}
    failed: int = 0
    skipped: int = 0

    def look(self, steps: list[StepTime]) -> None:
        """Take the steps that have not been looked at; those with prefill say little of drafts."""
        for step in steps:
            self.seen_ns = step.ended_ns
            if not step.busy_ns or not step.decodes or step.prefill_tokens:
                continue
            kind = self.kinds.setdefault(step.decodes.bit_length(), StepKind())
            each_ns = step.busy_ns / step.decodes
            if step.drafted:
                kind.drafted_ns.take_time(each_ns)
                kind.tokens.take(1 + step.accepted / step.decodes)
            else:
                kind.plain_ns.take_time(each_ns)

    def speedup(self, decodes: int) -> float | None:
        """Return how much faster tokens come with drafts; None where that was not seen."""
        kind = self.kinds.get(decodes.bit_length())
        if kind is None or not (kind.plain_ns.count and kind.drafted_ns.count):
            return None
        return kind.tokens.value * kind.plain_ns.value / kind.drafted_ns.value


class TriedDrafts(DraftingPolicy, frozen=True, kw_only=True):
    """Drafts are tried for each request, and go on while they pay.

    A request begins with half of `tokens` a step, for half of `steps`. It goes on with all of them while its drafts
    prove right often enough, and tokens come faster by what was measured of steps with drafts and without. Else it
    pauses, and tries again. After trials in a row that failed, new requests begin with a pause, more and more of them.
    What a grammar forces is drafted in a pause, too.
    """

    state_type = Trials
    tokens: Annotated[int, msgspec.Meta(ge=1, le=DRAFT_TOKENS_MAX)] = 8
    """Most tokens a step."""
    gain_min: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Drafts of a step that must prove right at the mean for a request to go on without a pause."""
    speedup_min: Annotated[float, msgspec.Meta(ge=0)] = 1.03
    """How much faster tokens must come with drafts, where both was measured."""
    steps: PositiveCount = 8
    """Steps after which it is judged what came of drafts."""
    pause_steps: PositiveCount = 128
    """Steps of a pause."""

    @property
    def guess(self) -> Draft:
        """All that is drafted while it pays."""
        raise NotImplementedError

    def grant(self, view: DraftingView) -> Draft:
        """Return a trial, as much as there may be, or a pause."""
        state: Trials = view.state
        state.look([step for step in view.measured.steps if step.ended_ns > state.seen_ns])
        last, guess = view.last, self.guess
        if last is None and _skips(state):
            return self.pause(view)
        if last is None or not (last.ngram or last.model):
            return msgspec.structs.replace(
                guess, tokens=(self.tokens + 1) // 2, steps=(self.steps + 1) // 2
            )
        if not view.drafted:
            return guess  # nothing was found, and nothing paid
        # A step drafts as many as it may, so at least so many steps had drafts.
        steps = view.drafted / max(last.tokens, 1)
        speedup = state.speedup(view.running)
        slow = speedup is not None and speedup < self.speedup_min
        if slow or view.accepted < self.gain_min * steps:
            state.failed += 1
            return self.pause(view)
        state.failed = 0
        return guess

    def pause(self, view: DraftingView) -> Draft:
        """Return what is drafted in a pause."""
        return Draft(self.tokens if view.held else 0, self.pause_steps)


def _skips(state: Trials) -> bool:
    """Return whether a new request is to begin with a pause."""
    if state.skipped + 1 < min(2 ** max(state.failed - 1, 0), SKIPPED_MAX):
        state.skipped += 1
        return True
    state.skipped = 0
    return False
