"""Admission policies: the waiting entries that join the next step, packed into its limits by an order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.policy import (
    Admission,
    AdmissionView,
    Count,
    EncodeLimits,
    PositiveCount,
    PreemptionMode,
    RequestPolicy,
    Seconds,
)

SECOND_NS = 1_000_000_000


def pack(
    view: AdmissionView,
    *,
    order: Iterable[int] | None = None,
    tokens_max: int | None = None,
    items_max: int | None = None,
) -> list[int]:
    """Return the entries that join, in order, up to the first that does not fit.

    The first entry of the order always joins; one of unknown size joins alone. If entries may join
    with a part of their tokens, an entry larger than the free tokens takes them all. Blocks are left
    to the kernel, which stops at the first entry without enough.

    Args:
        view: The waiting entries and the free resources.
        order: Indices into `view.waiting`, the most urgent first; the queue's order by default.
        tokens_max: The token budget, None for no budget.
        items_max: Maximum number of entries, None for no limit beyond the free ones.
    """
    room = tokens_max
    if view.divisible:
        room = view.tokens_free if room is None else min(room, view.tokens_free)
    count_max = view.entries_free if items_max is None else min(items_max, view.entries_free)
    chosen: list[int] = []
    for index in range(len(view.waiting)) if order is None else order:
        if len(chosen) >= count_max or (view.divisible and room is not None and room <= 0):
            break
        tokens = view.waiting[index].tokens
        if chosen and (tokens is None or not (room is None or view.divisible or tokens <= room)):
            break
        chosen.append(index)
        if tokens is None:
            break
        room = None if room is None else room - tokens
    return chosen


class Fifo(RequestPolicy, frozen=True, kw_only=True):
    """Admits in order of arrival, as many entries as fit; has no budget of its own.

    An entry of unknown size never counts as zero: it joins alone.
    """

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(pack(view))


class _Budgeted(RequestPolicy, frozen=True, kw_only=True):
    max_tokens: Count | None = None
    max_items: PositiveCount | None = None

    def encode_limits(self) -> EncodeLimits:
        return EncodeLimits(self.max_items, self.max_tokens)

    def pack(self, view: AdmissionView, order: Iterable[int] | None = None) -> list[int]:
        """Return the entries that join within the budget."""
        tokens = view.default_tokens if self.max_tokens is None else self.max_tokens
        return pack(view, order=order, tokens_max=tokens or None, items_max=self.max_items)


class TokenBudget(_Budgeted, frozen=True, kw_only=True):
    """Admits in order of arrival until the next entry would exceed a token budget.

    A sum equal to the budget is admitted. The first entry is always admitted, even above the
    budget, and then runs alone. The limits on entries and on tokens both apply. An entry of unknown
    size runs alone.

    Attributes:
        max_tokens: The budget of a step. None derives it from `generate.max_batch_tokens`; 0 means no budget.
        max_items: Maximum number of entries that join in one step. None means the free slots for
            requests; 8 for images, but 1 on a CPU, where a batch of all but the smallest takes as
            long as one by one.
    """

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(self.pack(view))


class Priority(_Budgeted, frozen=True, kw_only=True):
    """Admits by priority, the highest first, and in order of arrival within a priority.

    The priority of an entry rises by one for every `ageing_s` of waiting, so that nothing waits
    forever. Nothing overtakes a more urgent entry that does not fit yet. Otherwise it works like
    `token-budget`.

    Attributes:
        max_tokens: As in `token-budget`.
        max_items: As in `token-budget`.
        ageing_s: Waiting time that raises the priority by one; 0 for no ageing, which lets a low
            priority starve.
    """

    ageing_s: Seconds = 10.0

    def order(self, view: AdmissionView) -> list[int]:
        """Return all entries, the most urgent first."""
        ageing_ns = int(self.ageing_s * SECOND_NS)

        def urgency(index: int) -> int:
            entry = view.waiting[index]
            aged = (view.now_ns - entry.arrived_ns) // ageing_ns if ageing_ns else 0
            return -entry.priority - aged

        return sorted(range(len(view.waiting)), key=urgency)

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(self.pack(view, self.order(view)))


class Tiers(Priority, frozen=True, kw_only=True):
    """Admits by priority, and preempts requests of lower priority for waiting ones that find no free slot.

    A batch tier uses all slots while a chat tier is idle, and gives way to it. The victims are those
    of the lowest priority, the youngest first. Otherwise it works like `priority`.

    Attributes:
        mode: How a preempted request is resumed: `recompute`, or `swap` (`generate.swap_memory`).
    """

    preempts = True
    mode: PreemptionMode = "recompute"

    def needs(self) -> Sequence[str]:
        return ("swap",) if self.mode == "swap" else ()

    def admit(self, view: AdmissionView) -> Admission:
        free, running = view.entries_free, view.running_requests
        victims = sorted(view.eligible, key=lambda index: (-running[index].priority, index))
        room = msgspec.structs.replace(view, entries_free=free + len(victims))
        joining, preempt = self.pack(room, self.order(view)), list[int]()
        for index in joining[free:]:
            if running[victims[-1]].priority >= view.waiting[index].priority:
                break
            preempt.append(victims.pop())
        return Admission(joining[: free + len(preempt)], preempt=preempt, mode=self.mode)


BUCKETS_MAX = 24
"""Prompts are grouped by length, in powers of two."""


class OutputLengths(msgspec.Struct):
    """Mean output length by bucket of prompt lengths, -1 if unknown, and over all."""

    means: list[float] = msgspec.field(default_factory=lambda: [-1.0] * BUCKETS_MAX)
    mean: float = -1.0
    seen_ns: int = 0

    def learn(self, bucket: int, tokens: int, forget: float) -> None:
        """Update the means with one output length."""
        for_bucket = self.means[bucket]
        self.means[bucket] = (
            tokens if for_bucket < 0 else for_bucket + (tokens - for_bucket) * forget
        )
        self.mean = tokens if self.mean < 0 else self.mean + (tokens - self.mean) * forget


class ShortestFirst(RequestPolicy, frozen=True, kw_only=True):
    """Admits the request with the least expected work first, from its prompt length and its expected output length.

    The expected output length is the mean over prompts of about the same length, learned as
    requests end. The expectation shrinks while a request waits, so that none waits forever.

    Source: Fu et al., Efficient LLM Scheduling by Learning to Rank, NeurIPS 2024; the predictor
    here is a table of means.

    Attributes:
        output_weight: Cost of an output token, which takes a decode step; a prompt token costs 1.
        ageing_s: Waiting time after which a request is as urgent as the shortest.
        forget: Weight of the newest output in a mean.
    """

    state_type = OutputLengths
    output_weight: PositiveCount = 8
    ageing_s: Annotated[float, Meta(gt=0)] = 10.0
    forget: Annotated[float, Meta(gt=0, le=1)] = 0.1

    def admit(self, view: AdmissionView) -> Admission:
        lengths: OutputLengths = view.state
        for end in view.measured.ends:
            if end.ended_ns > lengths.seen_ns:
                lengths.learn(_bucket(end.prompt_tokens), end.output_tokens, self.forget)
        if view.measured.ends:
            lengths.seen_ns = view.measured.ends[-1].ended_ns

        means = [mean if mean >= 0 else max(lengths.mean, 0.0) for mean in lengths.means]
        outputs = [self.output_weight * mean for mean in means]
        aged_ns = view.now_ns - int(self.ageing_s * SECOND_NS)
        urgency = [
            ((entry.tokens or 0) + outputs[_bucket(entry.tokens or 0)])
            * (left_ns if (left_ns := entry.arrived_ns - aged_ns) > 0 else 0)
            for entry in view.waiting
        ]
        order = sorted(range(len(urgency)), key=urgency.__getitem__)
        return Admission(pack(view, order=order))


def _bucket(tokens: int) -> int:
    return min(tokens.bit_length(), BUCKETS_MAX - 1)
