"""Invalid requests are refused at once with clear errors, without effect on others."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.asking import GREEDY, TEXTS, Ask, answer, begin, data_url, drawn_image, read
from tests.e2e.conftest import CONTEXT_TOKENS, IMAGES_MAX, KV_TOKENS
from vsched import Engine, RequestRefused, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="package")

BESIDE = Ask(TEXTS[2], [drawn_image(900)], count=60)


def as_png(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def truncated() -> str:
    encoded = data_url(drawn_image(901, (200, 200)))
    data = base64.b64decode(encoded.partition(",")[2])
    return as_png(data[: len(data) // 2])


IMAGES: dict[str, Callable[[], str]] = {
    "no image": lambda: as_png(b"This is no image."),
    "truncated": truncated,
    "not base64": lambda: "data:image/png;base64,???",
    "empty": lambda: "data:image/png;base64,",
    "too thin": lambda: data_url(drawn_image(902, (1, 900))),
    "a file": lambda: "file:///etc/passwd",
    "a host": lambda: "http://127.0.0.1:1/image.png",
}


async def refusal(engine: Engine, **request: Any) -> RequestRefused:
    """Return the error of a refused request while another is served, which must be complete."""
    plain = await answer(engine, BESIDE)
    beside = await begin(engine, BESIDE)
    reading = asyncio.create_task(read(beside))
    with pytest.raises(RequestRefused) as caught:
        await engine.generate(request_id="refused", **request)
    assert (await reading).token_ids == plain.token_ids
    return caught.value


@pytest.mark.parametrize("name", IMAGES)
async def test_bad_image_is_refused_and_others_are_served(engine: Engine, name: str) -> None:
    """A 400 for that request, which names the image."""
    good = drawn_image(903)
    prompt = engine.preprocessor.render(Ask(TEXTS[0], [good, good]).messages)
    error = await refusal(
        engine, prompt=prompt, images=[data_url(good), IMAGES[name]()], sampling=GREEDY
    )
    assert error.status == 400
    assert "Remedy: " in error.message or "remedy" in error.message.lower(), error.message
    assert "image 1" in error.message or "images[1]" in error.message, error.message
    assert "/etc" not in error.message


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "code", "value"),
    [
        # A prompt that leaves no space is refused before its images are even decoded.
        (CONTEXT_TOKENS + 1, 1, "context_exceeded", f"{CONTEXT_TOKENS + 1} prompt tokens"),
        (40, CONTEXT_TOKENS, "context_exceeded", CONTEXT_TOKENS + 40),
        (KV_TOKENS, 1, "kv_exceeded", KV_TOKENS + 1),
        (40, KV_TOKENS, "kv_exceeded", KV_TOKENS + 40),
    ],
)
async def test_request_that_can_never_fit_is_refused(
    engine: Engine, prompt_tokens: int, max_tokens: int, code: str, value: int | str
) -> None:
    """Value, limit and remedy, at once."""
    sampling = SamplingParams(max_tokens=max_tokens)
    error = await refusal(engine, prompt=[100] * prompt_tokens, sampling=sampling)
    assert (error.code, error.status) == (code, 400)
    limit = CONTEXT_TOKENS if code == "context_exceeded" else KV_TOKENS
    assert f"value {value}, limit {limit} tokens" in error.message
    assert "Remedy: " in error.message


async def test_prompt_without_room_for_a_token_is_refused(engine: Engine) -> None:
    """`max_tokens` of 0 means the rest of the context, and is an error if that is nothing."""
    error = await refusal(engine, prompt=[100] * KV_TOKENS, sampling=SamplingParams(max_tokens=0))
    assert error.code in ("context_exceeded", "kv_exceeded")
    assert f"limit {KV_TOKENS} tokens" in error.message


async def test_max_tokens_of_zero_fills_what_is_left(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=0, temperature=0.0, ignore_eos=True)
    found = await answer(engine, Ask(TEXTS[4]), sampling)
    prompt = Ask(TEXTS[4]).prompt(engine.preprocessor)
    assert len(found.token_ids) == KV_TOKENS - len(prompt)


async def test_images_and_placeholders_must_match(engine: Engine) -> None:
    image = data_url(drawn_image(904))
    one = engine.preprocessor.render(Ask(TEXTS[0], [drawn_image(904)]).messages)
    error = await refusal(engine, prompt=one, images=[image, image], sampling=GREEDY)
    assert error.status == 400
    assert "value 1, limit 2. Remedy: " in error.message


async def test_too_many_images_are_refused(engine: Engine) -> None:
    images = [data_url(drawn_image(905))] * (IMAGES_MAX + 1)
    error = await refusal(engine, prompt="x", images=images, sampling=GREEDY)
    assert error.code == "too_many_images"
    assert f"value {IMAGES_MAX + 1} images, limit {IMAGES_MAX} images. Remedy: " in error.message


async def test_request_id_in_use_is_refused(engine: Engine) -> None:
    first = await begin(engine, BESIDE, request_id="refused")
    with pytest.raises(RequestRefused) as caught:
        await begin(engine, BESIDE, request_id="refused")
    assert caught.value.status == 409
    assert len((await read(first)).token_ids) == BESIDE.count


async def test_too_many_stop_tokens_are_refused(engine: Engine) -> None:
    sampling = SamplingParams(stop_token_ids=tuple(range(100)))
    error = await refusal(engine, prompt=[100], sampling=sampling)
    assert error.code == "too_many_stop_tokens"
