"""The server as the openai client sees it, with real ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

from tests.e2e.asking import (  # noqa: E402
    TEXTS,
    Ask,
    answer,
    begin,
    drawn_image,
    held,
    in_flight,
)
from tests.e2e.conftest import CONTEXT_TOKENS, KV_TOKENS, WAITING_MAX  # noqa: E402
from tests.patience import until  # noqa: E402
from vsched import Engine  # noqa: E402
from vsched.api.server import RunningServer  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="package")

ASK = Ask(TEXTS[1], [drawn_image(6000, (112, 84)), drawn_image(6001)], count=40)
OPTIONS: dict[str, Any] = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}


async def chat(client: Any, ask: Ask, **options: Any) -> Any:
    return await client.chat.completions.create(
        model="nano25", messages=ask.messages, max_tokens=ask.count, **OPTIONS, **options
    )


async def test_chat_streams_the_engine_s_text_with_usage(sdk: Any, engine: Engine) -> None:
    wanted = await answer(engine, ASK)
    stream = await chat(sdk, ASK, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    *body, last = chunks
    assert body[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == wanted.text
    reasons = [chunk.choices[0].finish_reason for chunk in body]
    assert reasons == [None] * (len(body) - 1) + ["length"]
    assert last.choices == []
    assert last.usage.completion_tokens == 40
    assert last.usage.prompt_tokens == len(ASK.prompt(engine.preprocessor))
    assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_answers_whole(sdk: Any, engine: Engine) -> None:
    wanted = await answer(engine, ASK)
    response = await chat(sdk, ASK)
    (choice,) = response.choices
    assert choice.message.content == wanted.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert response.usage.total_tokens == response.usage.prompt_tokens + 40
    assert response.usage.prompt_tokens_details.cached_tokens > 0
    assert response.model == "nano25"


async def test_chat_gives_logprobs(sdk: Any, engine: Engine) -> None:
    response = await chat(sdk, ASK, logprobs=True, top_logprobs=3)
    content = response.choices[0].logprobs.content
    assert len(content) == 40
    assert all(len(one.top_logprobs) == 3 for one in content)
    assert all(one.top_logprobs[0].logprob == one.logprob for one in content)
    text = b"".join(bytes(one.bytes) for one in content).decode(errors="replace")
    assert text == (await answer(engine, ASK)).text


async def test_chat_stops_at_a_string(sdk: Any, engine: Engine) -> None:
    text = (await answer(engine, ASK)).text
    response = await chat(sdk, ASK, stop=[text[4:7]])
    assert response.choices[0].message.content == text[: text.index(text[4:7])]
    assert response.choices[0].finish_reason == "stop"


async def test_second_turn_encodes_its_image_only(sdk: Any, engine: Engine) -> None:
    """As a user sees it: the prefix is there, and one image is new."""
    first = Ask(TEXTS[2], [drawn_image(6010)], count=8)
    said = (await chat(sdk, first)).choices[0].message.content
    before = engine.statistics()["encode"]["items_encoded"]
    messages = [
        *first.messages,
        {"role": "assistant", "content": said},
        *Ask(TEXTS[0], [drawn_image(6011)]).messages,
    ]
    response = await sdk.chat.completions.create(
        model="nano25", messages=messages, max_tokens=8, **OPTIONS
    )
    assert engine.statistics()["encode"]["items_encoded"] == before + 1
    prompt = len(first.prompt(engine.preprocessor))
    assert response.usage.prompt_tokens_details.cached_tokens >= prompt // 16 * 16


async def test_completions_take_text_and_tokens(sdk: Any, engine: Engine) -> None:
    ask = Ask(TEXTS[4], count=20)
    wanted = await answer(engine, ask)
    text = engine.preprocessor.render(ask.messages)
    for prompt in (text, engine.preprocessor.tokenize(text)):
        response = await sdk.completions.create(
            model="nano25", prompt=prompt, max_tokens=20, **OPTIONS
        )
        assert response.choices[0].text == wanted.text
        assert response.choices[0].finish_reason == "length"
    stream = await sdk.completions.create(
        model="nano25", prompt=text, max_tokens=20, stream=True, **OPTIONS
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == wanted.text


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|vision_start|>", "<|im_end|>"])
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


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
                    ],
                }
            ]
        },
        "image 0|images\\[0\\]",
    ),
    "prompt": ({"messages": Ask("long " * CONTEXT_TOKENS).messages, "max_tokens": 1}, "limit"),
    "kv": ({"messages": Ask().messages, "max_tokens": KV_TOKENS}, f"limit {KV_TOKENS} tokens"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_request_is_a_400_and_others_are_served(
    sdk: Any, engine: Engine, name: str
) -> None:
    body, words = BAD[name]
    wanted = await answer(engine, ASK)
    beside = asyncio.create_task(chat(sdk, ASK))
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await sdk.chat.completions.create(model="nano25", **body)
    error = caught.value.body
    assert isinstance(error, dict)
    assert error["type"] == "invalid_request_error"
    assert "Remedy: " in error["message"]
    assert (await beside).choices[0].message.content == wanted.text


async def test_full_queue_is_a_429_with_retry_after(sdk: Any, engine: Engine) -> None:
    """Accepted requests are answered; the others get a time to retry."""
    ask = Ask(TEXTS[1], count=100)
    outcomes = await asyncio.gather(*(chat(sdk, ask) for _ in range(60)), return_exceptions=True)
    refused = [one for one in outcomes if isinstance(one, openai.RateLimitError)]
    served = [one for one in outcomes if not isinstance(one, BaseException)]
    assert len(refused) + len(served) == 60
    assert refused
    assert len(served) >= WAITING_MAX
    assert all(int(one.response.headers["retry-after"]) > 0 for one in refused)
    assert f"limit {WAITING_MAX}. Remedy: " in str(refused[0])
    assert len({one.choices[0].message.content for one in served}) == 1


async def freed(engine: Engine) -> None:
    await until(lambda: not any(held(engine).values()), "the request of the lost client is aborted")
    await until(lambda: not any(in_flight(engine).values()), "the step in flight ends")


async def test_client_that_leaves_a_stream_is_aborted(sdk: Any, engine: Engine) -> None:
    before = engine.statistics()["finished"]["abort"]
    stream = await chat(sdk, Ask(TEXTS[1], [drawn_image(6020)], count=400), stream=True)
    await anext(aiter(stream))
    assert engine.statistics()["running"] == 1
    await stream.close()
    await freed(engine)
    assert engine.statistics()["finished"]["abort"] == before + 1


async def test_client_that_leaves_while_it_waits_is_aborted(sdk: Any, engine: Engine) -> None:
    """Without streaming too."""
    before = engine.statistics()["finished"]["abort"]
    waiting = asyncio.create_task(chat(sdk, Ask(TEXTS[1], [drawn_image(6021)], count=400)))
    await until(lambda: engine.statistics()["generate"]["decoding"] == 1, "it is being answered")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await freed(engine)
    assert engine.statistics()["finished"]["abort"] == before + 1


async def test_clear_ends_and_reports_all(sdk: Any, server: RunningServer, engine: Engine) -> None:
    """A stream ends in an error event, a waiting request in a 503."""
    ask = Ask(TEXTS[1], count=400)
    stream = await chat(sdk, ask, stream=True)
    await anext(aiter(stream))
    waiting = asyncio.create_task(chat(sdk, Ask(TEXTS[0], count=300)))
    await until(
        lambda: engine.statistics()["running"] + engine.statistics()["waiting"] == 2,
        "both are accepted",
    )
    async with httpx.AsyncClient() as plain:
        cleared = await plain.post(f"{server.url}/admin/clear")
    assert cleared.json() == {"running": 0, "waiting": 0}
    with pytest.raises(openai.APIError, match="cleared"):
        async for _ in stream:
            pass
    with pytest.raises(openai.InternalServerError, match="cleared") as caught:
        await waiting
    assert caught.value.status_code == 503


async def test_operations_answer(server: RunningServer, engine: Engine) -> None:
    async with httpx.AsyncClient(base_url=server.url) as plain:
        for path in ("/health", "/ready"):
            assert (await plain.get(path)).status_code == 200
        metrics = (await plain.get("/metrics")).text
        statistics = (await plain.get("/admin/statistics")).json()
        tokens = (await plain.post("/tokenize", json={"prompt": "What is it?"})).json()
    assert "vsched_" in metrics
    assert statistics["state"] == "ready"
    assert tokens["tokens"] == engine.preprocessor.tokenize("What is it?")


async def test_tokenize_counts_images_as_a_prompt_does(
    server: RunningServer, engine: Engine
) -> None:
    """Every placeholder counts as the tokens of its image; nothing is held afterwards."""
    ask = Ask(TEXTS[1], [drawn_image(6700, (112, 84)), drawn_image(6701)])
    async with httpx.AsyncClient(base_url=server.url) as plain:
        reply = (await plain.post("/tokenize", json={"messages": ask.messages})).json()
    assert reply["tokens"] == ask.prompt(engine.preprocessor)


async def test_images_are_resized_within_the_bounds_of_a_request(
    server: RunningServer, engine: Engine
) -> None:
    """Two sizes of a picture are two embeddings; each is counted at the size of its request."""
    small = {"max_pixels": 8 * 28 * 28}
    ask = Ask(TEXTS[0], [drawn_image(6702, (224, 168))])
    whole = {"messages": ask.messages, "max_tokens": 2, "temperature": 0}
    parts = [ask.messages[0]["content"][0] | small, ask.messages[0]["content"][1]]
    bodies = [
        whole,
        whole | {"mm_processor_kwargs": small},
        whole | {"messages": [{"role": "user", "content": parts}]},
        whole | {"mm_processor_kwargs": {"size": {"longest_edge": 8 * 28 * 28}}},
    ]
    before = engine.statistics()["encode"]["items_encoded"]
    counts = []
    async with httpx.AsyncClient(base_url=server.url) as plain:
        for body in bodies:
            answer = (await plain.post("/v1/chat/completions", json=body)).json()
            counts.append(answer["usage"]["prompt_tokens"])
            counted = {"mm_processor_kwargs": body.get("mm_processor_kwargs")}
            reported = await plain.post("/tokenize", json={"messages": body["messages"], **counted})
            assert reported.json()["count"] == counts[-1]
        wide = whole | {"mm_processor_kwargs": {"max_pixels": 10**9}}
        refused = await plain.post("/v1/chat/completions", json=wide)
    assert counts == [counts[0], *3 * [counts[0] - 8 * 6 + 6]]  # 3 by 2 tokens
    assert engine.statistics()["encode"]["items_encoded"] - before == 2
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "pixel_bounds_invalid"
    assert "value 1000000000 pixels, limit" in refused.json()["error"]["message"]


async def test_image_url_is_fetched_as_data_only(sdk: Any) -> None:
    """Remote images are off unless hosts are configured."""
    content = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}]
    with pytest.raises(openai.BadRequestError, match=r"add its host to media\.hosts"):
        await sdk.chat.completions.create(
            model="nano25", messages=[{"role": "user", "content": content}]
        )


async def test_statistics_hold_the_ledger_and_what_of_it_is_in_use(engine: Engine) -> None:
    """Every pool adds up to its total, and the use by requests shows while they run."""
    generation = await begin(engine, Ask(TEXTS[1], [drawn_image(6400)], count=60))
    while not (await anext(generation)).token_ids:
        pass
    ledger = engine.statistics()["ledger"]
    generation.abort()
    for pool in ledger["pools"]:
        assert sum(line["bytes"] for line in pool["lines"]) == pool["total"]
    named = {line["line"] for pool in ledger["pools"] for line in pool["lines"]}
    assert {"weights", "kv", "encoder activations", "arena", "image preprocessing"} <= named
    assert ledger["in_use"]["kv"] >= generation.prompt_tokens * engine.info.kv_bytes_per_token
    assert ledger["in_use"]["arena"] > 0
