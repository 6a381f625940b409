"""bfloat16 from start to stop: both stages in one process, two threads, sampled tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

pytest.importorskip("numba")

from tests.e2e.asking import TEXTS, Ask, begin, drawn_image, read
from tests.e2e.conftest import assert_idle
from vsched import Config, Engine, SamplingParams

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]


async def test_sampled_requests_are_served_and_their_probabilities_are_numbers(
    configure: Callable[..., Config],
) -> None:
    """A profiling run reads every KV block and draws tokens; then many short requests run at a time."""
    settings = (
        "model.dtype=bfloat16",
        "placement=together",
        "encode.threads=2",
        "generate.threads=2",
        'generate.memory={use="pinned", tokens=4096}',
    )
    async with Engine(configure("tiny25", *settings)) as engine:
        asks = [Ask(TEXTS[n % 5] * (1 + n % 3 * 9), [drawn_image(n)][: n % 2]) for n in range(24)]
        samplings = [
            SamplingParams(
                temperature=1.0, top_p=0.95, seed=n, ignore_eos=True, max_tokens=6 + n, logprobs=1
            )
            for n in range(24)
        ]
        started = [
            await begin(engine, ask, sampling)
            for ask, sampling in zip(asks, samplings, strict=True)
        ]
        for sampling, answer in zip(
            samplings, await asyncio.gather(*(read(one) for one in started)), strict=True
        ):
            assert answer.finish_reason == "length"
            assert len(answer.token_ids) == sampling.max_tokens
            assert all(-20 < one.logprob <= 0 for one in answer.logprobs)
            # NaNs draw the last token of the vocabulary, and equal logits any.
            assert len(set(answer.token_ids)) > 2
        await assert_idle(engine)
