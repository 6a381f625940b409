"""Drafting policies: tokens forced by a grammar, prompt lookup, and a draft model; guesses continue while they pay."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vsched.policy import (
    DRAFT_TOKENS_MAX,
    Count,
    Draft,
    DraftingPolicy,
    DraftingView,
    PositiveCount,
)
from vsched.policy.measured import StepTime

STEPS_BACK = 8
"""Approximate number of steps in an average."""
HELD_UP = 2.0
"""A longer step, as a multiple of the average, was delayed by something else, and counts as this multiple."""
SKIPPED_MAX = 8
"""If drafting does not pay, at least one in this many requests still tries it."""


class Average(msgspec.Struct):
    """Average of the latest values; 0 before the first."""

    value: float = 0.0
    count: int = 0

    def add_value(self, value: float) -> None:
        """Add a value."""
        self.count = min(self.count + 1, STEPS_BACK)
        self.value += (value - self.value) / self.count

    def add_time(self, took_ns: float) -> None:
        """Add a step time.

        Other programs can only make a step longer, so a much shorter one gets more weight: after a
        slow phase of the machine, the few steps of one trial show that drafting pays again.
        """
        self.add_value(min(took_ns, HELD_UP * self.value) if self.count else took_ns)
        self.value = min(self.value, HELD_UP * took_ns)


class StepKind(msgspec.Struct):
    """Times of steps of one size, with and without draft tokens, and the gain.

    Attributes:
        plain_ns: Step time per decoding request, without draft tokens.
        drafted_ns: The same with draft tokens.
        tokens: Tokens per request in a step with draft tokens.
    """

    plain_ns: Average = msgspec.field(default_factory=Average)
    drafted_ns: Average = msgspec.field(default_factory=Average)
    tokens: Average = msgspec.field(default_factory=Average)


class Trials(msgspec.Struct):
    """State of the policy.

    Attributes:
        seen_ns: End of the last step taken into account.
        kinds: By number of decoding requests, in powers of two.
        failed: Consecutive failed trials, over all requests.
        skipped: Requests without a trial since then.
    """

    seen_ns: int = 0
    kinds: dict[int, StepKind] = {}
    failed: int = 0
    skipped: int = 0

    def look(self, steps: list[StepTime]) -> None:
        """Take new steps into account, except those with prefill, which say little about drafting."""
        for step in steps:
            self.seen_ns = step.ended_ns
            if not step.busy_ns or not step.decodes or step.prefill_tokens:
                continue
            kind = self.kinds.setdefault(step.decodes.bit_length(), StepKind())
            each_ns = step.busy_ns / step.decodes
            if step.drafted:
                kind.drafted_ns.add_time(each_ns)
                kind.tokens.add_value(1 + step.accepted / step.decodes)
            else:
                kind.plain_ns.add_time(each_ns)

    def speedup(self, decodes: int) -> float | None:
        """Return the speedup by draft tokens; None if it was not measured."""
        kind = self.kinds.get(decodes.bit_length())
        if kind is None or not (kind.plain_ns.count and kind.drafted_ns.count):
            return None
        return kind.tokens.value * kind.plain_ns.value / kind.drafted_ns.value


class TriedDrafts(DraftingPolicy, frozen=True, kw_only=True):
    """Drafting is tried for each request, and continues while it pays.

    A request begins with half of `tokens` per step, for half of `steps`. It continues with the full
    numbers while enough of its draft tokens are accepted, and step times measured with and without
    draft tokens show a speedup. Otherwise it pauses and tries again. After consecutive failed
    trials, an increasing share of new requests begins with a pause. Tokens forced by a grammar are
    drafted in pauses, too.
    """

    state_type = Trials
    tokens: Annotated[int, msgspec.Meta(ge=1, le=DRAFT_TOKENS_MAX)] = 8
    """Maximum draft tokens per step."""
    gain_min: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Accepted draft tokens per step, on average, required to continue without a pause."""
    speedup_min: Annotated[float, msgspec.Meta(ge=0)] = 1.03
    """Required speedup by draft tokens, if it could be measured."""
    steps: PositiveCount = 8
    """Steps between two decisions on drafting."""
    pause_steps: PositiveCount = 128
    """Steps of a pause."""

    @property
    def guess(self) -> Draft:
        """The full grant."""
        raise NotImplementedError

    def grant(self, view: DraftingView) -> Draft:
        draft = self._wanted(view)
        return msgspec.structs.replace(draft, tokens=min(draft.tokens, view.rows_free))

    def _wanted(self, view: DraftingView) -> Draft:
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
            return guess  # nothing was drafted, so nothing was lost
        # A step drafts the maximum if it can, so this is a lower bound of the steps with draft
        # tokens.
        steps = view.drafted / max(last.tokens, 1)
        speedup = state.speedup(view.running)
        slow = speedup is not None and speedup < self.speedup_min
        if slow or view.accepted < self.gain_min * steps:
            state.failed += 1
            return self.pause(view)
        state.failed = 0
        return guess

    def pause(self, view: DraftingView) -> Draft:
        """Return the grant of a pause."""
        return Draft(self.tokens if view.held else 0, self.pause_steps)


def _skips(state: Trials) -> bool:
    """Return True if a new request should begin with a pause."""
    if state.skipped + 1 < min(2 ** max(state.failed - 1, 0), SKIPPED_MAX):
        state.skipped += 1
        return True
    state.skipped = 0
    return False


RETRY_STEPS = 64
"""Steps until more tokens are asked for, if there were too few free rows."""


class ForcedTokens(DraftingPolicy, frozen=True, kw_only=True):
    """Drafts tokens that a grammar forces, such as the keys and braces of a schema: these are always accepted.

    Requests without a grammar are not affected.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1, le=DRAFT_TOKENS_MAX)] = 8
    """Maximum draft tokens per step."""

    def grant(self, view: DraftingView) -> Draft:
        wanted = self.tokens if view.held else 0
        tokens = min(wanted, view.rows_free)
        return Draft(tokens, steps=RETRY_STEPS if tokens < wanted else 0)


class NoDrafts(DraftingPolicy, frozen=True, kw_only=True):
    """Drafts nothing: every step yields one token per request."""

    def grant(self, view: DraftingView) -> Draft:
        return Draft()


class PromptLookup(TriedDrafts, frozen=True, kw_only=True):
    """Drafts the tokens after an earlier occurrence of the last n-gram, and tokens forced by a grammar.

    A step with rejected draft tokens takes longer, on some processors twice as long. So a request
    tries drafting, continues while it pays, and pauses otherwise: text without repetition costs a
    step or two per pause. Copies, edits, code and lists gain most, with few running requests.

    Source: A. Saxena, "Prompt lookup decoding", 2023.
    """

    ngram: PositiveCount = 3
    """N-gram length to match."""

    @property
    def guess(self) -> Draft:
        """The full grant."""
        return Draft(self.tokens, self.steps, self.ngram)


class ModelDrafts(TriedDrafts, frozen=True, kw_only=True):
    """Drafts tokens with the model of `generate.draft_model`, and tokens forced by a grammar.

    A draft token costs a step of the draft model, and each request costs a prefill of its prompt in
    it. So this is for few concurrent requests; a request pauses when too few draft tokens are
    accepted, or when tokens come no faster.

    Source: Y. Leviathan, M. Kalman, Y. Matias, "Fast inference from transformers via speculative
    decoding", 2023.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1, le=DRAFT_TOKENS_MAX)] = 4
    """Maximum draft tokens per step."""
    running_max: PositiveCount = 4
    """Maximum number of running requests for drafting."""
    ngram: Count = 0
    """N-gram length: if the last tokens occurred before, the tokens after them are drafted without
    the model; 0 for never.
    """

    @property
    def guess(self) -> Draft:
        """The full grant, with draft model."""
        return Draft(self.tokens, self.steps, self.ngram, model=True)

    def grant(self, view: DraftingView) -> Draft:
        if view.running > self.running_max:
            return Draft(self.tokens if view.held else 0, self.steps)
        return super().grant(view)
