"""Requests that a rank runs concurrently, with and without draft tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from tests.unit.worker.test_generate_rank import join, tokens_of, whole
from vsched.kernel.decisions import DraftGrant, GenerateDecision
from vsched.kernel.events import Drafted
from vsched.types import FinishReason, SamplingParams
from vsched.worker.generate_rank import GenerateRank


@dataclass
class Received:
    """Output of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None


def run_drafted(
    rank: GenerateRank,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    rng: random.Random | None,
    *,
    stops: tuple[int, ...] = (),
    model: bool = False,
    blocks: Callable[[int], list[int]],
) -> tuple[list[Received], list[Drafted]]:
    """Run requests concurrently to their ends, with random grants of draft tokens if there is a generator.

    `blocks` returns all blocks that a slot can need. With `model`, draft tokens come from a draft model, too.
    """
    received = [Received() for _ in prompts]
    joins = [
        msgspec.structs.replace(
            join(slot + 1, slot, prompt, sampling=sampling, stops=stops), blocks=blocks(slot)
        )
        for slot, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
    ]
    decision = GenerateDecision(
        1, joined=joins, chunks=[whole(slot, len(prompt)) for slot, prompt in enumerate(prompts)]
    )
    drafted: list[Drafted] = []
    while not all(one.reason for one in received):
        result = rank.apply(decision)
        drafted += result.drafted
        more = {one.slot: one.tokens for one in result.drafted}
        for slot, token in enumerate(tokens_of(result)[: len(received)]):
            if token >= 0:
                received[slot].tokens += [token, *more.get(slot, [])]
        for reported in result.logprobs:
            received[reported.slot].logprobs.append(reported.logprob)
        for end in result.finished:
            assert received[end.slot].reason is None, "two ends"
            received[end.slot].reason = end.reason
        granted = []
        if rng is not None:
            granted = [
                DraftGrant(slot, rng.randint(0, 6), rng.randint(0, 2), model)
                for slot in range(len(prompts))
                if rng.random() < 0.4
            ]
        decision = GenerateDecision(decision.step + 1, granted=granted)
    return received, drafted
