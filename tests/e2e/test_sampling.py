"""A seeded request draws the same tokens alone, in a batch, and after it was preempted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.asking import TEXTS, Ask, answer, begin, drawn_image, read
from vsched import Engine, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="package")

ASK = Ask(TEXTS[1], [drawn_image(101), drawn_image(102, (64, 64))], count=100)
OLDER = [Ask(TEXTS[number], [drawn_image(200 + number)]) for number in range(3)]
"""Three long answers fill the KV cache, so a younger request has to be preempted."""

SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3, "seed": 1},
    "nucleus": {"temperature": 0.9, "top_p": 0.8, "seed": 2},
    "top-k": {"temperature": 1.1, "top_k": 12, "seed": 3},
    "min-p": {"temperature": 1.5, "min_p": 0.02, "seed": 4},
    "repetition": {"temperature": 0.8, "repetition_penalty": 1.3, "seed": 5},
    "counted": {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.4, "seed": 6},
    "all": {
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.005,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "seed": 7,
    },
    "biased": {
        "temperature": 0.9,
        "logit_bias": ((40, 3.0), (41, -100.0)),
        "bad_words": ((45,), (40, 46)),
        "min_tokens": 20,
        "seed": 9,
    },
    "greedy-penalised": {"temperature": 0.0, "repetition_penalty": 1.4, "seed": 8},
}


QUICK = ("all", "biased", "greedy-penalised")
"""Together they have every parameter."""


def sampling(name: str, **changes: Any) -> SamplingParams:
    chosen: dict[str, Any] = {"max_tokens": ASK.count, "ignore_eos": True}
    return SamplingParams(**chosen | SAMPLINGS[name] | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in SAMPLINGS],
)
async def test_seeded_sampling_is_the_same_alone_and_preempted_in_a_crowd(
    engine: Engine, name: str
) -> None:
    """Neither other requests nor a forced preemption change the tokens of a seed."""
    alone = await answer(engine, ASK, sampling(name))
    older = [
        await begin(engine, ask, SamplingParams(max_tokens=110, temperature=0.0, ignore_eos=True))
        for ask in OLDER
    ]
    request_id = f"sampled-{name}"
    sampled = await begin(engine, ASK, sampling(name), request_id)
    beside = await asyncio.gather(read(sampled), *(read(one) for one in older))
    preemptions = sampled.times.preemptions
    assert preemptions > 0, "nothing was tested"
    assert beside[0].token_ids == alone.token_ids
    assert beside[0].text == alone.text
    assert len(alone.token_ids) == ASK.count


async def test_seeds_give_different_answers(engine: Engine) -> None:
    tasks = [answer(engine, ASK, sampling("temperature", seed=seed)) for seed in range(6)]
    found = await asyncio.gather(*tasks)
    assert len({each.text for each in found}) == 6


async def test_penalties_change_the_greedy_answer(engine: Engine) -> None:
    plain = await answer(
        engine, ASK, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    )
    penalised = await answer(engine, ASK, sampling("greedy-penalised", max_tokens=60))
    assert len(set(penalised.token_ids)) > len(set(plain.token_ids))
