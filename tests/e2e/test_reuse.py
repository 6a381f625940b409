"""Nothing is computed twice: conversations, choices of a prompt, and the same image from many clients."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from tests.e2e.asking import GREEDY, TEXTS, Ask, data_url, drawn_image, held, read
from vsched import Engine, SamplingParams
from vsched.aio.streams import Generation

pytestmark = pytest.mark.asyncio(loop_scope="package")

BLOCK = 16


def counters(engine: Engine) -> dict[str, int]:
    now: dict[str, Any] = engine.statistics()
    return {
        "items_encoded": now["encode"]["items_encoded"],
        "tokens_encoded": now["encode"]["tokens_encoded"],
        "tokens_prefilled": now["generate"]["tokens_prefilled"],
        "processed": now["media"]["processed"],
        "repeated": now["media"]["repeated"],
    }


def grown(engine: Engine, before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in counters(engine).items()}


@pytest.mark.slow
async def test_next_turn_encodes_the_new_image_and_prefills_the_new_tokens(engine: Engine) -> None:
    """Turn k of a conversation costs its own image and its own tokens, not the tokens of the turns before."""
    # Random weights may yield an image placeholder: then that conversation has no next turn.
    turns = [
        await converse(engine, [drawn_image(700 + 4 * n + k) for k in range(4)]) for n in range(4)
    ]
    assert max(turns) == 4, f"no conversation was whole: {turns}"


async def converse(engine: Engine, images: list[Image.Image]) -> int:
    """Check the cost of each turn of a conversation; return the number of its turns."""
    preprocessor = engine.preprocessor
    prompt: list[int] = []
    computed = 0  # tokens whose KV the turns before left behind
    for turn, image in enumerate(images):
        text = preprocessor.render(Ask(TEXTS[turn], [image]).messages)
        prompt += preprocessor.tokenize(text if turn == 0 else "<|im_end|>\n" + text)
        before = counters(engine)
        generation = await engine.generate(
            prompt=list(prompt),
            images=[data_url(one) for one in images[: turn + 1]],
            sampling=GREEDY,
            request_id=f"turn-{turn}",
        )
        found = await read(generation)
        cached = computed // BLOCK * BLOCK
        assert grown(engine, before) == {
            "items_encoded": 1,
            "tokens_encoded": preprocessor.plan_image(*image.size).tokens,
            "tokens_prefilled": generation.prompt_tokens - cached,
            "processed": 1,
            "repeated": turn,
        }
        assert generation.cached_tokens == cached
        assert generation.times.encoded_items == 1
        if engine.info.image_token_id in found.token_ids:
            return turn + 1
        computed = generation.prompt_tokens + len(found.token_ids) - 1  # the last was only sampled
        prompt += found.token_ids
    return len(images)


async def choose(engine: Engine, ask: Ask, count: int, **chosen: Any) -> list[Generation]:
    return await engine.generate_choices(
        prompt=engine.preprocessor.render(ask.messages),
        images=[data_url(image) for image in ask.images],
        sampling=SamplingParams(ignore_eos=True, max_tokens=ask.count, **chosen),
        request_ids=[f"choice#{number}" for number in range(count)],
    )


async def test_choices_share_the_prompt_and_the_first_is_that_of_its_seed(engine: Engine) -> None:
    """Images are held until the last choice ends."""
    ask = Ask(TEXTS[3], [drawn_image(9102), drawn_image(9103, (112, 84))], count=24)
    seeded: dict[str, Any] = {"temperature": 1.5, "seed": 77}
    before = counters(engine)
    several = [(await read(one)).token_ids for one in await choose(engine, ask, 3, **seeded)]
    after = grown(engine, before)
    assert after["items_encoded"] == 2
    assert after["tokens_prefilled"] <= len(ask.prompt(engine.preprocessor)) + 2 * BLOCK
    (alone,) = [await read(one) for one in await choose(engine, ask, 1, **seeded)]
    assert several[0] == alone.token_ids
    assert len({tuple(one) for one in several}) == 3
    first, second = await choose(engine, Ask(TEXTS[4], [drawn_image(9105)], count=200), 2)
    first.abort()
    assert held(engine)["pixel_bytes"] > 0
    second.abort()
    assert held(engine)["pixel_bytes"] == 0
