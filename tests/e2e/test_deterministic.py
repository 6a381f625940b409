"""With `model.deterministic`, a stream in bfloat16 has the same tokens alone, among others, and after a loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.asking import TEXTS, Ask, answer, begin, drawn_image
from tests.e2e.conftest import assert_idle
from tests.e2e.losing import answers_over_a_kill
from vsched import Config, Engine, SamplingParams
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
from vsched_workers.plugin import TRAINED

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.slow,
    pytest.mark.skipif(not has_bf16_dot(), reason="needs avx512_bf16"),
]

SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=120, logprobs=2)


async def test_tokens_are_the_same_alone_among_others_and_after_a_kill(
    configure: Callable[..., Config],
) -> None:
    settings = (
        f"model.path={TRAINED}",
        "model.name=demo",
        "model.deterministic=true",
        "generate.prefix_cache=false",
        'generate.memory={use="pinned", tokens=2048}',
    )
    asks = [
        Ask(TEXTS[n % 5], [drawn_image(3000 + 10 * n + k) for k in range(n % 3)]) for n in range(6)
    ]
    # Kernels that a process compiled itself may round differently from cached ones (docs/determinism.md).
    async with Engine(configure("nano25", *settings)):
        pass
    async with Engine(configure("nano25", *settings)) as engine:
        assert engine.info.dtype == "bfloat16"
        wanted = [await answer(engine, ask, SAMPLING) for ask in asks]
        started = [await begin(engine, ask, SAMPLING) for ask in asks]
        found = await answers_over_a_kill(engine, started, engine.rank_pids[1], tokens=120)
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
        # The trained model is sure of its tokens; its log-probabilities show every bit.
        assert [one.logprobs for one in found] == [one.logprobs for one in wanted]
        await assert_idle(engine)
