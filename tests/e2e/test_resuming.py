"""The engine dies: another one goes on with its answers, and clients read them to their ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.asking import TEXTS, Ask, answer, read
from tests.patience import patience
from vsched import Engine, SamplingParams
from vsched.errors import RequestRefused
from vsched.record.left import Begun, prompt_digest
from vsched.types import Request

pytestmark = pytest.mark.asyncio(loop_scope="package")

ASK = Ask(TEXTS[1], count=40)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "seed": 11},
    "penalised": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "top_k": 40},
}


async def go_on(engine: Engine, token_ids: list[int], sampling: SamplingParams) -> Any:
    """Have an answer go on behind tokens that it has."""
    prompt = engine.preprocessor.render(ASK.messages)
    prompt_token_ids = engine.preprocessor.tokenize(prompt)
    request = Request(request_id="", prompt_token_ids=prompt_token_ids)
    async with patience():
        (stream,) = await engine.generate_answers(
            prompt=prompt,
            sampling=sampling,
            request_ids=("resumed",),
            begun=Begun(prompt_digest(request), tuple(token_ids)),
        )
    return await read(stream)


@pytest.mark.parametrize("way", WAYS)
async def test_answer_goes_on_with_the_tokens_that_it_would_have_had(
    engine: Engine, way: str
) -> None:
    """Wherever it was, and its stream tells all of it, with the same text."""
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, **WAYS[way])
    whole = await answer(engine, ASK, sampling)
    for known in (0, 1, 17, 39):
        resumed = await go_on(engine, whole.token_ids[:known], sampling)
        assert resumed.token_ids == whole.token_ids
        assert resumed.text == whole.text
        assert resumed.finish_reason == "length"


async def test_answer_ends_at_a_stop_string_among_the_tokens_that_it_had(engine: Engine) -> None:
    """The engine died after the token that completes it, before it could end the request."""
    whole = await answer(engine, ASK)
    stop = whole.deltas[8].text
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40, stop=(stop,))
    stopped = await answer(engine, ASK, sampling)
    assert stopped.finish_reason == "stop"
    resumed = await go_on(engine, stopped.token_ids, sampling)
    assert (resumed.text, resumed.finish_reason) == (stopped.text, "stop")


async def test_tokens_that_no_model_has_are_refused(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    with pytest.raises(RequestRefused, match="a token id"):
        await go_on(engine, [1 << 30], sampling)
