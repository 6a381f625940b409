"""Shortest job first, by output lengths that are learned or given in a table."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.policy import Admission, AdmissionView, PositiveCount, RequestPolicy
from vsched_policies.admission.packing import SECOND_NS, pack

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
    requests end, or given by `table`. The expectation shrinks while a request waits, so that none
    waits forever.

    Source: Fu et al., Efficient LLM Scheduling by Learning to Rank, NeurIPS 2024; the predictor
    here is a table.

    Attributes:
        table: Pairs of a prompt length and the expected output length of prompts up to it,
            ascending; the last pair also applies beyond. Empty to learn.
        output_weight: Cost of an output token, which takes a decode step; a prompt token costs 1.
        ageing_s: Waiting time after which a request is as urgent as the shortest.
        forget: Weight of the newest output in a mean.
    """

    state_type = OutputLengths
    table: tuple[tuple[PositiveCount, PositiveCount], ...] = ()
    output_weight: PositiveCount = 8
    ageing_s: Annotated[float, Meta(gt=0)] = 10.0
    forget: Annotated[float, Meta(gt=0, le=1)] = 0.1

    def admit(self, view: AdmissionView) -> Admission:
        """Return the requests with the least expected work, within the limits of the step."""
        lengths: OutputLengths = view.state
        for end in view.measured.ends:
            if end.ended_ns > lengths.seen_ns:
                lengths.learn(_bucket(end.prompt_tokens), end.output_tokens, self.forget)
        if view.measured.ends:
            lengths.seen_ns = view.measured.ends[-1].ended_ns

        works = _Works(self, lengths)
        aged_ns = view.now_ns - int(self.ageing_s * SECOND_NS)
        urgency = [
            works[entry.tokens] * (left_ns if (left_ns := entry.arrived_ns - aged_ns) > 0 else 0)
            for entry in view.waiting
        ]
        order = sorted(range(len(urgency)), key=urgency.__getitem__)
        return Admission(pack(view, order=order))

    def expected(self, prompt_tokens: int, lengths: OutputLengths) -> float:
        """Return the expected output length of a prompt."""
        for tokens, expected in self.table:
            if prompt_tokens <= tokens:
                return expected
        if self.table:
            return self.table[-1][1]
        mean = lengths.means[_bucket(prompt_tokens)]
        return max(mean if mean >= 0 else lengths.mean, 0.0)


class _Works(dict[int | None, float]):
    """The expected work by prompt length, computed once for each length: hundreds of requests may wait."""

    def __init__(self, policy: ShortestFirst, lengths: OutputLengths) -> None:
        super().__init__()
        self._policy, self._lengths = policy, lengths

    def __missing__(self, tokens: int | None) -> float:
        prompt = tokens or 0
        expected = self._policy.expected(prompt, self._lengths)
        work = self[tokens] = prompt + self._policy.output_weight * expected
        return work


def _bucket(tokens: int) -> int:
    return min(tokens.bit_length(), BUCKETS_MAX - 1)
