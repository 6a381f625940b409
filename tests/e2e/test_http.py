"""The server as the openai client sees it, with real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.asking import TEXTS, Ask, answer, drawn_image
from tests.each_case import each_case
from vsched import Engine

pytestmark = pytest.mark.asyncio(loop_scope="package")

ASK = Ask(TEXTS[1], [drawn_image(6000, (112, 84)), drawn_image(6001)], count=40)
OPTIONS: dict[str, Any] = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}


async def chat(client: Any, ask: Ask, **options: Any) -> Any:
    return await client.chat.completions.create(
        model="nano25", messages=ask.messages, max_tokens=ask.count, **OPTIONS, **options
    )


async def test_chat_has_the_engine_s_text_in_every_form(sdk: Any, engine: Engine) -> None:
    wanted = await answer(engine, ASK)
    stream = await chat(sdk, ASK, stream=True, stream_options={"include_usage": True})
    *body, last = [chunk async for chunk in stream]
    assert body[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == wanted.text
    reasons = [chunk.choices[0].finish_reason for chunk in body]
    assert reasons == [None] * (len(body) - 1) + ["length"]
    assert last.choices == []
    prompt = len(ASK.prompt(engine.preprocessor))
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (prompt, 40)
    response = await chat(sdk, ASK, logprobs=True, top_logprobs=3)
    (choice,) = response.choices
    assert (choice.message.content, choice.finish_reason) == (wanted.text, "length")
    assert response.usage.total_tokens == prompt + 40
    assert response.usage.prompt_tokens_details.cached_tokens > 0
    content = choice.logprobs.content
    assert len(content) == 40
    assert all(len(one.top_logprobs) == 3 for one in content)
    assert all(one.top_logprobs[0].logprob == one.logprob for one in content)
    assert b"".join(bytes(one.bytes) for one in content).decode(errors="replace") == wanted.text
    stop = wanted.text[4:7]
    (choice,) = (await chat(sdk, ASK, stop=[stop])).choices
    assert choice.message.content == wanted.text[: wanted.text.index(stop)]
    assert choice.finish_reason == "stop"


@each_case("token", ["<|image_pad|>", "<|vision_start|>", "<|im_end|>"])
async def test_a_special_token_in_a_text_is_text(sdk: Any, engine: Engine, token: str) -> None:
    """In a client's text it is no image and no end of a turn; the request is served, alone and next to an image."""
    pad = engine.info.placeholder
    ask = Ask(f"What is {token}?", [drawn_image(6020)], count=4)
    plan = engine.preprocessor.plan_image(*ask.images[0].size)
    assert ask.prompt(engine.preprocessor).count(pad) == plan.tokens
    for one in (ask, Ask(f"What is {token}?", count=4)):
        response = await chat(sdk, one)
        assert response.usage.prompt_tokens == len(one.prompt(engine.preprocessor))
    raw = await sdk.completions.create(
        model="nano25", prompt=f"What is {token}?", max_tokens=4, **OPTIONS
    )
    assert raw.choices[0].finish_reason == "length"
