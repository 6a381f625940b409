"""Prompt log-probabilities with real ranks, compared with the logits of transformers' own model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.asking import TEXTS, Ask, data_url, drawn_image, read
from tests.workers.reference import Reference
from vsched import Engine, SamplingParams
from vsched.aio.streams import PromptToken

pytestmark = pytest.mark.asyncio(loop_scope="package")

TEXT = (
    "What a request tells of its prompt is what the model makes of each token by those before it."
    * 2
)


@pytest.fixture(scope="module")
def expected(checkpoints: Callable[[str], Path]) -> Callable[[list[int]], Any]:
    """Return a function for the log-probabilities [tokens, vocabulary] after each token of a text."""
    model = Reference(checkpoints("nano25")).model

    def logprobs(token_ids: list[int]) -> Any:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([token_ids])).logits[0].float().log_softmax(-1)

    return logprobs


def check(reported: list[PromptToken], token_ids: list[int], wanted: Any, *, top: int) -> None:
    assert [one.token_id for one in reported] == token_ids[1:]
    for one, row in zip(reported, wanted[:-1], strict=True):
        assert one.logprob == pytest.approx(row[one.token_id].item(), abs=1e-4)
        assert one.rank == int((row > row[one.token_id]).sum()) + 1
        best = row.topk(top)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_prompt_logprobs_are_those_of_the_model_however_chunks_cut(
    engine: Engine, expected: Callable[[list[int]], Any]
) -> None:
    """The second time, all but the last token is cached, and still computed."""
    token_ids = engine.preprocessor.tokenize(TEXT)
    assert len(token_ids) > 2 * engine.config.generate.chunk_tokens
    wanted = expected(token_ids)
    for top in (3, 0):
        (generation,) = await engine.generate_choices(
            prompt=token_ids,
            sampling=SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=top),
            request_ids=["told"],
        )
        await read(generation)
        assert generation.prompt_report is not None
        check(list(generation.prompt_report.tokens()), token_ids, wanted, top=top)
        assert generation.cached_tokens == 0


async def test_prompt_logprobs_work_with_images(engine: Engine) -> None:
    ask = Ask(TEXTS[1], [drawn_image(9200, (112, 84))])
    generation = await engine.generate(
        prompt=engine.preprocessor.render(ask.messages),
        images=[data_url(image) for image in ask.images],
        sampling=SamplingParams(prompt_only=True, prompt_logprobs=1),
        request_id="told",
    )
    found = await read(generation)
    assert (found.token_ids, found.text, found.finish_reason) == ([], "", "length")
    assert generation.prompt_report is not None
    reported = list(generation.prompt_report.tokens())
    assert [one.token_id for one in reported] == ask.prompt(engine.preprocessor)[1:]
