"""Simulated requests become real ones of the same sizes, with the same shared parts."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image as PillowImage

from tests.unit.media.fakes import PLACEHOLDER, FakePreprocessor, model_info
from vsched.bench.fidelity.measure import RequestTexts
from vsched.bench.load.generator import draw_picture
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Reply, Text, workload_of

LIMIT = 64
"""Maximum tokens of an image; a token is 8 pixels square."""


@pytest.fixture(scope="module")
def texts() -> RequestTexts:
    return RequestTexts(FakePreprocessor(model_info(item_tokens_max=LIMIT)))


def arrival(*prompt: PromptPart, tenant: str = "") -> Arrival:
    return Arrival(at_ns=5, request_id="r", prompt=prompt, output_tokens=7, tenant=tenant)


def size_of(url: str) -> tuple[int, int]:
    _, _, data = url.partition("base64,")
    return PillowImage.open(io.BytesIO(base64.b64decode(data))).size


def test_dresser_measures_the_image_processor(texts: RequestTexts) -> None:
    assert texts.pixels_per_token == 64
    assert texts.bytes_per_token == 4 * 48 * 4


@pytest.mark.parametrize("tokens", [1, 4, 7, 12, 63, 64])
def test_dresser_draws_pictures_of_the_size_that_it_tells(texts: RequestTexts, tokens: int) -> None:
    fitted = texts.fit_arrival(arrival(Image("a", tokens)))
    (image,) = fitted.images
    assert tokens * 0.7 <= image.tokens <= tokens
    width, height = size_of(texts.pictures(fitted)[0])
    assert width * height == texts.pixels_of(tokens) == 64 * image.tokens
    assert texts.tokens_of(image.tokens) == image.tokens, "once fitted, it stays as it is"


def test_dresser_scales_large_images_down(texts: RequestTexts) -> None:
    fitted = texts.fit_arrival(arrival(Image("a", 5000)))
    assert fitted.images[0].tokens == LIMIT


def test_dresser_draws_equal_pictures_for_equal_keys_of_one_tenant(texts: RequestTexts) -> None:
    one, same = Image("a", 16), Image("a", 16)
    first, again = texts.pictures(arrival(one, Text(1, 1), same))
    assert first == again
    assert texts.pictures(arrival(one, tenant="t")) != [first]
    assert texts.pictures(arrival(Image("b", 16))) != [first]


def test_dresser_puts_a_token_between_images(texts: RequestTexts) -> None:
    fitted = texts.fit_arrival(arrival(Image("a", 4), Image("b", 4), Text(3, 5), Image("c", 4)))
    kinds = [type(part) for part in fitted.prompt]
    assert kinds == [Image, Text, Image, Text, Image]
    ids = texts.prompt(fitted)
    assert [index for index, token in enumerate(ids) if token == PLACEHOLDER] == [0, 2, 8]
    assert len(ids) == fitted.prompt_tokens - 3 * 4 + 3


def test_dresser_writes_texts_that_begin_alike_where_simulated_ones_do(texts: RequestTexts) -> None:
    short, long, other = (
        texts.text(content, tokens) for content, tokens in ((1, 5), (1, 50), (2, 50))
    )
    assert long[:5] == short
    assert long != other
    assert len(long) == 50
    assert PLACEHOLDER not in long + other


def test_dresser_repeats_what_the_model_answered(texts: RequestTexts) -> None:
    said = arrival(Text(1, 2), Reply(3), Text(2, 2), Reply(2))
    ids = texts.prompt(said, [[70, 71, 72], [73, 74, 75]])
    assert ids[2:5] == [70, 71, 72]
    assert ids[7:] == [73, 74]


def test_dresser_calls_an_engine_with_all_that_an_arrival_says(texts: RequestTexts) -> None:
    one = Arrival(
        at_ns=0,
        request_id="r",
        prompt=(Text(1, 2),),
        output_tokens=9,
        priority=3,
        ttft_target_ms=40,
        tenant="t",
    )
    call = texts.call(one, [])
    sampling = call.pop("sampling")
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (9, True, 0.0)
    assert call == {
        "prompt": texts.text(1, 2),
        "images": [],
        "request_id": "r",
        "priority": 3,
        "ttft_target_ms": 40,
        "cache_salt": "t",
    }


def test_dresser_fits_a_workload_once(texts: RequestTexts) -> None:
    workload = workload_of("w", [arrival(Image("a", 7), Image("b", 90))])
    fitted = texts.fit(workload)
    assert [image.tokens for one in fitted for image in one.images] == [6, 64]
    assert list(fitted) == list(fitted)
    assert (fitted.name, fitted.requests) == ("w", 1)


def test_pictures_are_the_same_in_every_process() -> None:
    assert draw_picture(3, 16, 8) == draw_picture(3, 16, 8)
    assert size_of(draw_picture(3, 16, 8)) == (16, 8)
