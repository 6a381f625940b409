"""Outputs of requests through the whole engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.e2e.asking import TEXTS, Ask, answer, data_url, drawn_image, read
from tests.e2e.conftest import KV_TOKENS
from vsched import Engine, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="package")

ASK = Ask(TEXTS[1], [drawn_image(400, (112, 84)), drawn_image(401, (64, 64))], count=100)


def greedy(**changes: Any) -> SamplingParams:
    chosen: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40}
    return SamplingParams(**chosen | changes)


async def test_special_tokens_are_text_where_they_are_requested(engine: Engine) -> None:
    """Stop strings find them, and the stop reason is reported as for any other stop."""
    end, *_ = engine.info.stop_token_ids
    name = engine.preprocessor.token_bytes(end).decode()
    shown = greedy(logit_bias=((end, 100.0),), max_tokens=3, show_special=True)
    cases: list[tuple[dict[str, Any], tuple[str, str, int]]] = [
        ({"show_special": False}, ("", "length", 3)),
        ({}, (3 * name, "length", 3)),
        ({"stop": (name,)}, ("", "stop", 1)),
        ({"ignore_eos": False}, ("", "stop", 1)),
        ({"ignore_eos": False, "include_stop": True}, (name, "stop", 1)),
    ]
    for changes, wanted in cases:
        found = await answer(engine, ASK, msgspec.structs.replace(shown, **changes))
        assert (found.text, found.finish_reason, len(found.token_ids)) == wanted, changes


@pytest.mark.parametrize("max_tokens", [0, 10**6])
async def test_output_ends_with_the_kv_cache(engine: Engine, max_tokens: int) -> None:
    found = await answer(engine, Ask(TEXTS[4]), greedy(max_tokens=max_tokens))
    prompt = Ask(TEXTS[4]).prompt(engine.preprocessor)
    assert len(found.token_ids) == KV_TOKENS - len(prompt)


async def test_prompt_logprobs_are_those_that_the_tokens_had_as_outputs(engine: Engine) -> None:
    """Next to images, in chunks, without an output of its own, and computed although all is cached."""
    found = await answer(engine, ASK, greedy(logprobs=2))
    rendered = engine.preprocessor.tokenize(engine.preprocessor.render(ASK.messages))
    (generation,) = await engine.generate_choices(
        prompt=rendered + found.token_ids,
        images=[data_url(image) for image in ASK.images],
        sampling=SamplingParams(prompt_only=True, prompt_logprobs=2),
        request_ids=["told"],
    )
    told = await read(generation)
    assert (told.token_ids, told.text, told.finish_reason) == ([], "", "length")
    assert generation.cached_tokens == 0
    assert generation.prompt_report is not None
    reported = list(generation.prompt_report.tokens())
    prompt = ASK.prompt(engine.preprocessor) + found.token_ids
    assert [one.token_id for one in reported] == prompt[1:]
    for one, output in zip(reported[-40:], found.logprobs, strict=True):
        assert one.rank == 1
        assert one.logprob == pytest.approx(output.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in output.top]
