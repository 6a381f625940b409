"""How much prefill a step can bear while others decode: learned from the time that steps took.

A prompt token costs a part that is the same for all (its way through the layers) and a part that grows with the tokens
before it (attention): at 16,000 tokens of context, 64 tokens took 30 times what they take at none. A limit in tokens
alone therefore either starves short prompts or stalls decoders beside long ones. So both parts are fitted to what ranks
report, by least squares that forget, and a chunk is cut to the time that is left in its step. The errors are relative
to the time that was measured: else a large, slow chunk would outweigh a hundred small ones that come after it, and the
chunks would stay small long after a neighbour has left the cores.

What decodes alone take is seen in steps without prefill, and while requests wait there are none, though ever more
decode. So it is kept together with how many they were, and each one more counts as a prompt token.

The times come in with events, so the kernel stays a function of its events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from vsched.kernel.decisions import ChunkPlan, GenerateDecision, Join
from vsched.kernel.request import RequestState
from vsched.kernel.snapshot import Restorable, Saved

FORGET = 0.9
"""What an observation still counts after the next one: about the last ten steps with prefill decide."""
HELD_UP = 2.0
"""A step of decodes alone that took more than so many times what it should was held up by something else, and counts
as just that."""
NOISE = 0.05
"""Part of the time of a step below which the time of its prefill says nothing."""

_UNPLANNED = (0, 0, 0.0)


class StepTimeModel(Restorable):
    """What decoding and prefill cost in this group; `target_ns` is how long a step with both may take, 0 for no limit.

    `ratio` times the time of decoding alone is always allowed: a target near that time would starve prefill, and the
    few requests that decode already would keep the others from joining them.
    """

    _known_decodes: Saved[float] = 0.0
    _known_ns: Saved[float] = 0.0
    _planned: Saved[dict[int, tuple[int, int, float]]]
    _sums: Saved[tuple[float, float, float, float, float]] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def __init__(self, target_ns: int, ratio: float, block_size: int) -> None:
        self._target_ns = target_ns
        self._ratio = ratio
        self._block_size = block_size
        self._planned = {}
        self._costs = (0.0, 0.0)

    def start_step(self, tokens: int, *, decodes: int) -> StepBudget:
        """Return what a step may prefill that has room for `tokens` beside its decodes."""
        return StepBudget(self, tokens, self.left_ns(decodes) or math.inf)

    def left_ns(self, decodes: int) -> float:
        """Return how long something else may keep `decodes` requests from their next step; 0 for no limit."""
        if not (self._target_ns and decodes):
            return 0.0
        decode_ns = self.decode_ns(decodes)
        return max(max(self._target_ns, self._ratio * decode_ns) - decode_ns, 1.0)

    def note(self, step: int, decodes: int, budget: StepBudget | None = None) -> None:
        """Remember what a step consists of until its time is known; it has no budget where nothing is prefilled."""
        if budget is None:
            self._planned[step] = (decodes, 0, 0.0)
        else:
            self._planned[step] = (decodes, budget.prefilled, budget.pairs)

    def learn(self, step: int, busy_ns: int, drafts: int = 0) -> tuple[int, int, float]:
        """Take the time that a step took on the ranks, 0 where it was not measured; return what it consisted of.

        Drafts took rows as decodes do.
        """
        composition = self._planned.pop(step, _UNPLANNED)
        if busy_ns > 0 and self._target_ns:
            decodes, tokens, pairs = composition
            self._fit(busy_ns, decodes + drafts, tokens, pairs)
        return composition

    def _fit(self, busy_ns: int, decodes: int, tokens: int, pairs: float) -> None:
        if not tokens:
            if decodes:
                part = 1.0
                if self._known_ns:
                    part = 1 - FORGET
                    busy_ns = min(busy_ns, int(HELD_UP * self.decode_ns(decodes)))
                self._known_decodes += (decodes - self._known_decodes) * part
                self._known_ns += (busy_ns - self._known_ns) * part
            return
        known = min(decodes, self._known_decodes)
        count = tokens + decodes - known
        cost = max(busy_ns - self.decode_ns(known), 0.0)
        # Between the time of the step, which bounds the noise, and that of its prefill, which is what is learned.
        scale = math.sqrt(busy_ns * max(cost, NOISE * busy_ns))
        count, pairs, cost = count / scale, pairs / scale, cost / scale
        new = (count * count, count * pairs, pairs * pairs, count * cost, pairs * cost)
        self._sums = tuple(FORGET * old + one for old, one in zip(self._sums, new, strict=True))  # type: ignore[assignment]
        self._costs = self._solve()

    def decode_ns(self, decodes: float) -> float:
        """Return what `decodes` decodes should take by themselves."""
        token_ns, _ = self.costs()
        if not (decodes and self._known_decodes):
            return token_ns * decodes
        mean_ns = self._known_ns / self._known_decodes
        return self._known_ns + min(token_ns, mean_ns) * (decodes - self._known_decodes)

    def drop_planned(self) -> None:
        """No step in flight will complete."""
        self._planned.clear()

    def costs(self) -> tuple[float, float]:
        """Return ns a token, and ns a pair of a token and one before it; neither is below 0."""
        return self._costs

    def _solve(self) -> tuple[float, float]:
        tt, tp, pp, tc, pc = self._sums
        whole = tt * pp - tp * tp
        if whole > 1e-6 * tt * pp:
            token_ns, pair_ns = (tc * pp - pc * tp) / whole, (pc * tt - tc * tp) / whole
            if token_ns >= 0 and pair_ns >= 0:
                return token_ns, pair_ns
        # The last steps were too much alike to tell the two apart, or noise won: one of them explains it all.
        return (0.0, pc / pp) if pp and pc * tt > tc * tp else (tc / tt if tt else 0.0, 0.0)

    @property
    def block_ns(self) -> float:
        """What a block at the beginning of a prompt should take."""
        return self.nanoseconds(0, self._block_size)

    def tokens_within(self, left_ns: float, start: int) -> float:
        """Return how many tokens from position `start` on take `left_ns`; a block at least."""
        token_ns, pair_ns = self.costs()
        first_ns = token_ns + pair_ns * start
        if not first_ns or left_ns == math.inf:
            return math.inf
        # first_ns * n + pair_ns * n² / 2 = left_ns
        tokens = 2 * left_ns / (first_ns + math.sqrt(first_ns**2 + 2 * pair_ns * left_ns))
        return max(tokens - tokens % self._block_size, self._block_size)

    def rebuild(self) -> None:
        self._costs = self._solve()

    def nanoseconds(self, start: int, tokens: int) -> float:
        """Return what tokens from `start` on should take."""
        token_ns, pair_ns = self.costs()
        return tokens * token_ns + pairs_of(start, tokens) * pair_ns


class StepBudget:
    """What one step may still prefill, in tokens and in time, and what it has been given."""

    def __init__(self, model: StepTimeModel, tokens: int, left_ns: float) -> None:
        self.tokens = tokens
        self.prefilled = 0
        self.pairs = 0.0
        self._model = model
        self._left_ns = left_ns

    @property
    def spent(self) -> bool:
        """Whether nothing more fits."""
        return self.tokens <= 0 or self._left_ns <= 0

    def limit_time(self, left_ns: float) -> None:
        """Let what is prefilled take this long, where there is a limit."""
        if self._left_ns != math.inf:
            self._left_ns = left_ns

    @property
    def time_ns(self) -> int | None:
        """How long what is prefilled may take; None for any time."""
        return None if self._left_ns == math.inf else int(self._left_ns)

    def tokens_at(self, start: int) -> int:
        """Return how many tokens of a prompt, from position `start` on, fit: a block at least, until it is spent."""
        if self.spent:
            return 0
        return int(min(self.tokens, self._model.tokens_within(self._left_ns, start)))

    def take(self, start: int, tokens: int) -> None:
        """A chunk of `tokens` tokens from `start` on is in the step."""
        self.tokens -= tokens
        self._left_ns -= self._model.nanoseconds(start, tokens)
        if self._left_ns < self._model.block_ns:
            # A block of another prompt would pass the time, and a chunk more costs a step more than its tokens.
            self._left_ns = 0.0
        self.prefilled += tokens
        self.pairs += pairs_of(start, tokens)


def pairs_of(start: int, tokens: int) -> float:
    """Return the pairs of a token and one before it that attention visits for tokens from `start` on."""
    return tokens * (start + tokens / 2)


@dataclass(slots=True)
class StepPlan:
    """A step while it is formed."""

    step: int
    budget: StepBudget
    joined: list[Join] = field(default_factory=list)
    chunks: list[ChunkPlan] = field(default_factory=list)
    prefilled: list[RequestState] = field(default_factory=list)


class PlannedStep(msgspec.Struct, frozen=True):
    """What came of planning a step.

    Attributes:
        decision: The step; None when there is nothing to run, or enough is in flight.
        requeued: Requests that must find their way into the queue again: preempted, or without their embeddings.
        prefilled: Requests with a chunk in this step, after which they decode or go on prefilling.
        more: Whether more may come of it though nothing of the group changes: another step may be sent behind this
            one, or a policy, which let nobody go on, may decide otherwise after the next event.
    """

    decision: GenerateDecision | None = None
    requeued: Sequence[RequestState] = ()
    prefilled: Sequence[RequestState] = ()
    more: bool = False


NOTHING_PLANNED = PlannedStep()
