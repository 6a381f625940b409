"""A model of step times, the budget of prefill tokens in a step with decodes, and how requests share it.

The time of a prompt token has a constant part (its way through the layers) and a part proportional to the tokens before
it (attention): with 16,000 tokens of context, 64 tokens took 30 times as long as with none. So a limit in tokens either
starves short prompts or stalls decodes next to long ones. Both parts are fitted to the times that ranks report, by
least squares with exponential forgetting, and a chunk is cut to the time left in its step. Errors are relative to the
measured time: else a large, slow chunk would outweigh a hundred small ones after it, and chunks would stay small long
after other processes have left the cores.

The time of decodes alone is measured in steps without prefill. While requests wait there are no such steps, but the
number of decodes grows. So the time is kept with its number of decodes, and each further decode counts as a prompt
token.

A long step delays every decoding request for the sake of the waiting ones. So the limit of a step falls with the number
of decoding requests for each waiting one (`limit_share`): a long video next to 31 streams takes short steps, and a
queue of prompts long ones: with a long queue, the ratio even grows.

A request that arrives during a long prompt waits for the steps in flight. So prefill alone has a limit, too.

Times are part of events, so a host that is a function of its events remains one of its events.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vsched.policy import StepShares, StepView
from vsched.policy.checks import PASSED_OVER
from vsched.policy.requests import pairs_of, tokens_taking
from vsched.policy_host.seats import PolicySeat
from vsched.policy_host.snapshot import Restorable, Saved

FORGET = 0.9
"""Weight of an observation after the next one: about the last ten steps with prefill count."""
HELD_UP = 2.0
"""Limit for the time of a step of decodes, as a multiple of the expected time: a longer one was held up by something
else."""
LAST_CHUNK = 1.5
"""Maximum length of the last chunk of a prompt, as a multiple of the length that its time limit allows."""
NOISE = 0.05
"""Share of the time of a step below which the time of its prefill is noise."""
PATIENCE = 5
"""Decoding requests that a waiting request may delay for the whole limit of a step."""
QUEUE_SHARE = 2.0
"""Maximum share of the ratio of a step, reached with four waiting requests for each decoding one."""
RATIO_MIN = 1.75
"""Ratio to its decodes that a step may take next to any number of them. Encoding may take as long in between."""

_UNPLANNED = (0, 0, 0.0)


def limit_share(decoding: int, waiting: int) -> float:
    """Return the share of the limit of a step that `waiting` requests justify next to `decoding` ones.

    It is more than 1, for the ratio alone, with a long queue: the more requests decode together, the less the others
    wait.
    """
    if not decoding:
        return 1.0
    share = PATIENCE * max(waiting, 1) / decoding
    return share if share < 1.0 else max(1.0, min(QUEUE_SHARE, waiting / (2 * decoding)))


class StepTimeModel(Restorable):
    """The times of decodes and prefill in a group.

    `target_ns` is the limit for a step with both, and `prefill_ns` that for a step of prefill alone; 0 for none. A step
    may always take `ratio` times as long as its decodes: a target near that time would starve prefill, and a few
    decoding requests would keep all others from joining. Prefill alone may take as long as next to one decode: shorter
    steps would mostly wait for the weights.

    Attributes:
        costs: ns per token, and ns per pair of a token and one before it; neither is negative.
    """

    _known_decodes: Saved[float] = 0.0
    _known_ns: Saved[float] = 0.0
    _planned: Saved[dict[int, tuple[int, int, float]]]
    _sums: Saved[tuple[float, float, float, float, float]] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def __init__(self, target_ns: int, ratio: float, block_size: int, prefill_ns: int = 0) -> None:
        self._target_ns = target_ns
        self._prefill_ns = prefill_ns
        self._ratio = ratio
        self._block_size = block_size
        self._planned = {}
        self.costs = (0.0, 0.0)

    def budget_for(self, tokens: int, *, decodes: int, share: float = 1.0) -> PrefillBudget:
        """Return the budget of a step with room for `tokens` next to its decodes."""
        left_ns = self.left_ns(decodes, share) if decodes else self._alone_ns
        return PrefillBudget(self, tokens, left_ns or math.inf, 1.0 if decodes else LAST_CHUNK)

    def left_ns(self, decodes: int, share: float = 1.0) -> float:
        """Return how long other work may delay the next step of `decodes` requests; 0 for no limit.

        `share` of the limit holds (`limit_share`).
        """
        if not (self._target_ns and decodes):
            return 0.0
        decode_ns = self.decode_ns(decodes)
        ratio = max(self._ratio * share, min(self._ratio, RATIO_MIN))
        return max(max(self._target_ns * min(share, 1.0), ratio * decode_ns) - decode_ns, 1.0)

    @property
    def _alone_ns(self) -> float:
        """Time limit of a step of prefill alone; 0 for no limit."""
        return max(self._prefill_ns, self._ratio * self.decode_ns(1)) if self._prefill_ns else 0.0

    def note_step(self, step: int, decodes: int, budget: PrefillBudget | None = None) -> None:
        """Note the composition of a step until its time is known; there is no budget without prefill."""
        if budget is None:
            self._planned[step] = (decodes, 0, 0.0)
        else:
            self._planned[step] = (decodes, budget.prefilled, budget.pairs)

    def learn(self, step: int, busy_ns: int, drafts: int = 0) -> tuple[int, int, float]:
        """Learn the time of a step on the ranks, 0 if it was not measured; return the composition of the step.

        A draft takes a row, like a decode.
        """
        composition = self._planned.pop(step, _UNPLANNED)
        if busy_ns > 0 and (self._target_ns or self._prefill_ns):
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
        # Between the time of the step, which bounds the noise, and that of its prefill, which is learned.
        scale = math.sqrt(busy_ns * max(cost, NOISE * busy_ns))
        count, pairs, cost = count / scale, pairs / scale, cost / scale
        new = (count * count, count * pairs, pairs * pairs, count * cost, pairs * cost)
        self._sums = tuple(FORGET * old + one for old, one in zip(self._sums, new, strict=True))  # type: ignore[assignment]
        self.costs = self._solve()

    def decode_ns(self, decodes: float) -> float:
        """Return the expected time of `decodes` decodes without prefill."""
        token_ns, _ = self.costs
        if not (decodes and self._known_decodes):
            return token_ns * decodes
        mean_ns = self._known_ns / self._known_decodes
        return self._known_ns + min(token_ns, mean_ns) * (decodes - self._known_decodes)

    def drop_planned(self) -> None:
        """Forget the steps in flight, which will not complete."""
        self._planned.clear()

    def _solve(self) -> tuple[float, float]:
        tt, tp, pp, tc, pc = self._sums
        whole = tt * pp - tp * tp
        if whole > 1e-6 * tt * pp:
            token_ns, pair_ns = (tc * pp - pc * tp) / whole, (pc * tt - tc * tp) / whole
            if token_ns >= 0 and pair_ns >= 0:
                return token_ns, pair_ns
        # The latest steps are too similar to separate the two, or too noisy: attribute all time to one of them.
        return (0.0, pc / pp) if pp and pc * tt > tc * tp else (tc / tt if tt else 0.0, 0.0)

    @property
    def block_ns(self) -> float:
        """Expected time of a block at the start of a prompt."""
        return self.nanoseconds(0, self._block_size)

    def tokens_within(self, left_ns: float, start: int) -> float:
        """Return the number of tokens from position `start` that take `left_ns`, at least a block."""
        token_ns, pair_ns = self.costs
        first_ns = token_ns + pair_ns * start
        if not first_ns or left_ns == math.inf:
            return math.inf
        tokens = tokens_taking(left_ns, first_ns, pair_ns)
        return max(tokens - tokens % self._block_size, self._block_size)

    def rebuild(self) -> None:
        self.costs = self._solve()

    def nanoseconds(self, start: int, tokens: int) -> float:
        """Return the expected time of tokens from `start`."""
        token_ns, pair_ns = self.costs
        return tokens * token_ns + pairs_of(start, tokens) * pair_ns


class PrefillBudget:
    """The prefill that is left in a step, in tokens and time, and the prefill that it has.

    The last chunk of a prompt may take `last` times the time that is left.
    """

    def __init__(
        self, model: StepTimeModel, tokens: int, left_ns: float, last: float = 1.0
    ) -> None:
        self.tokens = tokens
        self._last = last
        self.prefilled = 0
        self.pairs = 0.0
        self._model = model
        self._left_ns = left_ns

    @property
    def spent(self) -> bool:
        """Whether no more prefill fits."""
        return self.tokens <= 0 or self._left_ns <= 0

    def limit_time(self, left_ns: float) -> None:
        """Set the time for prefill, if it is limited."""
        if self._left_ns != math.inf:
            self._left_ns = left_ns

    @property
    def time_ns(self) -> int | None:
        """Time left for prefill; None for no limit."""
        return None if self._left_ns == math.inf else int(self._left_ns)

    def tokens_at(self, start: int, left: float = math.inf) -> int:
        """Length of the next chunk from `start`: at least a block, 0 if the budget is spent.

        `left` is the rest of the prompt; a slightly longer last chunk takes less time than two (`LAST_CHUNK`).
        """
        if self.spent:
            return 0
        chunk = self._model.tokens_within(self._left_ns, start)
        return int(min(self.tokens, left if left <= self._last * chunk else chunk))

    def add_chunk(self, start: int, tokens: int) -> None:
        """Add a chunk of `tokens` tokens from `start` to the step."""
        self.tokens -= tokens
        self._left_ns -= self._model.nanoseconds(start, tokens)
        if self._left_ns < self._model.block_ns:
            # A block of another prompt would exceed the time, and a further chunk has a cost of its own.
            self._left_ns = 0.0
        self.prefilled += tokens
        self.pairs += pairs_of(start, tokens)


NONE_ADVANCES = "no request would have advanced"
"""Reason of an answer that the host did not follow because nothing decodes and no request would be prefilled."""


class DecidedShares(NamedTuple):
    """The prefills of a step, by their indices in the view.

    Attributes:
        shares: Maximum tokens of each request that advances, in order; None for no limit.
        left_out: Requests that the policy left out, overdue ones included.
        unlimited: Whether all requests advance without limits. If not, nothing decodes, and no request got a chunk, the
            host lets all advance in order of arrival, and overrules the policy with `NONE_ADVANCES`.
    """

    shares: Mapping[int, int | None]
    left_out: Sequence[int]
    unlimited: bool


def decide_shares(seat: PolicySeat, view: StepView, budget: PrefillBudget) -> DecidedShares:
    """Ask the step policy; set its time limit in the budget of the step."""
    count, late = len(view.prefilling), view.overdue
    answer: StepShares = seat.decide(view, count)
    if answer.time_ns is not None and view.decodes and not late:
        budget.limit_time(max(answer.time_ns, 1))  # with 0, no waiting request could join
    shares: dict[int, int | None] = dict.fromkeys(answer.order)
    if answer.tokens is not None:
        shares = {index: most for index, most in zip(shares, answer.tokens, strict=True) if most}
    unlimited = answer.tokens is None and len(shares) == count
    left_out = (
        [index for index in range(count) if index not in shares] if len(shares) < count else ()
    )
    if any(index not in shares for index in late):
        seat.overrule(PASSED_OVER)
        shares = {**dict.fromkeys([index for index in late if index not in shares]), **shares}
    return DecidedShares(shares, left_out, unlimited)
