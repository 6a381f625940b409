"""Several choices per prompt, and several prompts, with real ranks: outputs, and sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

from tests.e2e.asking import TEXTS, Ask, answer, data_url, drawn_image, held, read  # noqa: E402
from vsched import Engine, SamplingParams  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="package")

PLAIN = "/v1/completions"
CHAT = "/v1/chat/completions"


async def ask_for(engine: Engine, ask: Ask, count: int, **chosen: Any) -> list[list[int]]:
    generations = await engine.generate_choices(
        prompt=engine.preprocessor.render(ask.messages),
        images=[data_url(image) for image in ask.images],
        sampling=SamplingParams(ignore_eos=True, max_tokens=ask.count, **chosen),
        request_ids=[f"{ask.text}{chosen}{number}" for number in range(count)],
    )
    return [(await read(one)).token_ids for one in generations]


async def test_greedy_answers_are_those_of_generate(
    engine: Engine, generated: Callable[[str, Sequence[Ask]], list[list[int]]]
) -> None:
    ask = Ask(TEXTS[2], [drawn_image(9100, (112, 84)), drawn_image(9101)], count=24)
    encoded, prefilled = counted(engine)
    found = await ask_for(engine, ask, 3, temperature=0.0)
    assert found == [generated("nano25", [ask])[0]] * 3
    tokens = len(ask.prompt(engine.preprocessor))
    now_encoded, now_prefilled = counted(engine)
    assert now_encoded - encoded == 2
    block = engine.config.generate.block_size
    assert now_prefilled - prefilled <= tokens + 2 * block


def counted(engine: Engine) -> tuple[int, int]:
    now = engine.statistics()
    return now["encode"]["items_encoded"], now["generate"]["tokens_prefilled"]


async def test_first_seeded_answer_is_the_only_one_and_others_differ(engine: Engine) -> None:
    ask = Ask(TEXTS[3], [drawn_image(9102)], count=24)
    seeded: dict[str, Any] = {"temperature": 1.5, "seed": 77}
    (alone,) = await ask_for(engine, ask, 1, **seeded)
    several = await ask_for(engine, ask, 3, **seeded, top_k=0)
    assert several[0] == alone
    assert len({tuple(one) for one in several}) == 3
    assert await ask_for(engine, ask, 3, **seeded, min_tokens=0) == several


async def test_answers_that_do_not_fit_together_come_one_after_the_other(engine: Engine) -> None:
    """With 480 tokens of KV cache they preempt each other."""
    ask = Ask(TEXTS[4], [drawn_image(9103)], count=150)
    found = await ask_for(engine, ask, 6, temperature=0.0)
    assert found == [(await answer(engine, ask)).token_ids] * 6


async def test_images_are_held_until_the_last_answer_ends(engine: Engine) -> None:
    ask = Ask(TEXTS[4], [drawn_image(9105)], count=200)
    first, second = await engine.generate_choices(
        prompt=engine.preprocessor.render(ask.messages),
        images=[data_url(image) for image in ask.images],
        sampling=SamplingParams(ignore_eos=True, max_tokens=ask.count),
        request_ids=["held", "held#1"],
    )
    first.abort()
    assert held(engine)["pixel_bytes"] > 0
    second.abort()
    assert held(engine)["pixel_bytes"] == 0


async def test_choices_of_a_chat(client: Any, engine: Engine) -> None:
    ask = Ask(TEXTS[1], [drawn_image(9104)], count=12)
    body = {"messages": ask.messages, "max_tokens": ask.count, "ignore_eos": True, "n": 2}
    reply = (await client.post(CHAT, json={**body, "temperature": 0})).json()
    wanted = (await answer(engine, ask)).text
    texts = [(one["index"], one["message"]["content"]) for one in reply["choices"]]
    assert texts == [(0, wanted), (1, wanted)]
    tokens = len(ask.prompt(engine.preprocessor))
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (tokens, 24)


async def test_choices_of_a_list_of_prompts(client: Any) -> None:
    """Each is the same as alone; for texts and tokens alike."""
    body = {"max_tokens": 8, "temperature": 1.2, "seed": 3, "ignore_eos": True}

    async def texts(**fields: Any) -> list[str]:
        reply = await client.post(PLAIN, json={**body, **fields})
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        assert [one["index"] for one in choices] == list(range(len(choices)))
        return [one["text"] for one in choices]

    prompts = ["One little", "and another one that is longer"]
    alone = [text for prompt in prompts for text in await texts(prompt=prompt, n=2)]
    assert await texts(prompt=prompts, n=2) == alone
    tokens = [
        (await client.post("/tokenize", json={"prompt": prompt})).json()["tokens"]
        for prompt in prompts
    ]
    assert await texts(prompt=tokens, n=2) == alone
    best = await texts(prompt=prompts, n=1, best_of=2)
    assert best[0] in alone[:2]
    assert best[1] in alone[2:]
