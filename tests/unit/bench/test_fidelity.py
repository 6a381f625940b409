"""Requests of comparisons are those of the simulation, with the same shared parts; calibrations keep to limits."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import cast
from unittest.mock import Mock

import msgspec
import pytest
from PIL import Image as PillowImage

from tests.each_case import each_case
from tests.unit.media.fakes import PLACEHOLDER, FakePreprocessor, model_info
from vsched.bench.fidelity.calibration import ROUND_COST_MIN, CalibrationLimits, plan_round
from vsched.bench.fidelity.measure import RequestTexts, TraceClient
from vsched.engine import Engine
from vsched.errors import ConfigError
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Reply, Text, Video, workload_of
from vsched.worker.contract import ImagePlan

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


@each_case("tokens", [1, 4, 7, 12, 63, 64])
def test_dresser_draws_pictures_of_the_size_that_it_tells(texts: RequestTexts, tokens: int) -> None:
    fitted = texts.fit_arrival(arrival(Image("a", tokens)))
    (image,) = fitted.images
    assert tokens * 0.7 <= image.tokens <= tokens
    width, height = size_of(texts.pictures(fitted)[0])
    assert width * height == texts.pixels_of(tokens) == 64 * image.tokens
    assert texts.tokens_of(image.tokens) == image.tokens, "once fitted, it stays as it is"
    assert (texts.pixels_per_token, texts.bytes_per_token) == (64, 4 * 48 * 4)


def test_dresser_measures_squares_of_a_model_whose_strips_have_more_tokens() -> None:
    """As of `workers/demo-model`: at most 48 tokens, but a long strip is rounded up to 97."""

    class Clamped(FakePreprocessor):
        def plan_image(self, width: int, height: int) -> ImagePlan:
            plan = super().plan_image(width, height)
            return plan if plan.tokens <= 48 else super().plan_image(64, 48)

    texts = RequestTexts(Clamped(model_info(item_tokens_max=97)))
    assert (texts.pixels_per_token, texts.tokens_of(97)) == (64, 48)


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


def test_dresser_repeats_the_answers_of_the_model(texts: RequestTexts) -> None:
    """For a turn that was not sent, any text."""
    said = arrival(Text(1, 2), Reply(3), Text(2, 2), Reply(2))
    ids = texts.prompt(said, [[70, 71, 72], [73, 74, 75]])
    assert (ids[2:5], ids[7:]) == ([70, 71, 72], [73, 74])
    assert len(texts.prompt(said, [[70, 71, 72]])) == len(ids)


def test_calls_name_tenant_session_and_adapter(texts: RequestTexts) -> None:
    """As the simulation that they are compared with does; runs differ in the salt of caches only."""
    one = msgspec.structs.replace(
        arrival(Text(1, 2), tenant="t"), conversation="c", cache_salt="run 1 t", adapter="a"
    )
    call = texts.call(one, [])
    assert (call["tenant"], call["session"], call["cache_salt"]) == ("t", "c", "run 1 t")
    assert call["adapter"] == "a"
    assert texts.call(arrival(Text(1, 2), tenant="t"), [])["cache_salt"] == "t"


async def test_clients_leave_as_in_the_trace(texts: RequestTexts) -> None:
    client = TraceClient(Mock(generate=lambda **_: asyncio.sleep(60)), lambda: 0)
    one = msgspec.structs.replace(arrival(Text(1, 2)), leaves_ns=1)
    await client.send_workload(texts, workload_of("w", [one]), lambda: None)
    assert client.failed == {"abort": 1}


def test_traces_that_cannot_be_compared_are_refused(texts: RequestTexts) -> None:
    with pytest.raises(ConfigError, match="r: no videos can be sent"):
        texts.fit_arrival(arrival(Video("v", 2, 4)))
    client = TraceClient(cast("Engine", None), lambda: 0)
    client.failed["context_exceeded"] = 2
    with pytest.raises(ConfigError, match=r"no request was served: \{.context_exceeded.: 2\}"):
        client.side()


def test_dresser_fits_a_workload_once(texts: RequestTexts) -> None:
    workload = workload_of("w", [arrival(Image("a", 7), Image("b", 90))])
    fitted = texts.fit(workload)
    assert [image.tokens for one in fitted for image in one.images] == [6, 64]
    assert list(fitted) == list(fitted)
    assert (fitted.name, fitted.requests) == ("w", 1)


# --- requests of a calibration stay within the engine's limits and the budget ---


def limits(**changes: int) -> CalibrationLimits:
    large = {
        "slots": 64,
        "kv_tokens": 65536,
        "context_tokens": 32768,
        "item_tokens": 1280,
        "images": 64,
        "pixel_tokens": 14000,
    }
    return CalibrationLimits(**{**large, **changes})


LARGE = limits()
PLENTY = 1e9


def test_round_has_everything_that_has_a_price() -> None:
    trials = plan_round(LARGE, PLENTY)
    asks = [ask for trial in trials for ask in trial.asks]
    assert {len(ask.images) for ask in asks} >= {0, 1, 2, 4, 8}
    assert max(len(trial.asks) for trial in trials) == 64
    assert max(ask.text for ask in asks) == 8192
    assert [len(trial.decoding) for trial in trials if trial.decoding] == [1, 1, 8, 8]
    assert any(ask.outputs > 1 for ask in asks)


@each_case(
    "tight",
    [
        limits(slots=4),
        limits(kv_tokens=2048),
        limits(context_tokens=600),
        limits(item_tokens=100),
        limits(images=1),
        limits(pixel_tokens=300),
        limits(images=0, item_tokens=0),
    ],
)
def test_round_stays_within_limits(tight: CalibrationLimits) -> None:
    trials = plan_round(tight, PLENTY)
    assert 3 < len(trials) < len(plan_round(LARGE, PLENTY))
    for trial in trials:
        assert tight.fit([*trial.asks, *trial.decoding])
        assert len(trial.asks) + len(trial.decoding) <= tight.slots
        for ask in (*trial.asks, *trial.decoding):
            assert ask.prompt + ask.outputs < tight.context_tokens
            assert all(tokens <= tight.item_tokens for tokens in ask.images)


def test_round_stays_within_its_cost_and_takes_the_cheapest_first() -> None:
    trials = [one for one in plan_round(LARGE, 20_000) if not one.decoding]
    costs = [trial.cost for trial in trials]
    assert costs == sorted(costs)
    assert ROUND_COST_MIN < sum(costs) <= 20_000
    few = [one for one in plan_round(LARGE, 1) if not one.decoding]
    assert 0 < sum(one.cost for one in few) <= ROUND_COST_MIN
    assert any(ask.images for trial in few for ask in trial.asks)
