"""`python -m tests.bench.parts lag` sends the described cases, and counts events that would have been late."""

from __future__ import annotations

import base64

import msgspec
import pytest

from tests.bench.parts.lag.cases import OUTPUT_TOKENS, lag_cases
from tests.bench.parts.lag.meter import lateness
from tests.unit.media.fakes import model_info
from vsched.api.contract import ApiSettings
from vsched.config import MediaConfig
from vsched.media.embeddings import read_tensors


def test_lateness_counts_what_was_due_during_a_stall() -> None:
    assert lateness([]) == [0.0]
    assert lateness([0.001, 0.0015]) == [0.0, pytest.approx(0.0005)]
    assert lateness([0.0045]) == pytest.approx([0.0035, 0.0025, 0.0015, 0.0005])


def test_cases_fill_the_limits_and_never_exceed_those_of_the_body() -> None:
    media = MediaConfig(image_pixels_max=250_000, webp_pixels_max=40_000, images_max=3)
    api = ApiSettings(body_bytes_max=4_000_000)
    cases = lag_cases(model_info(item_tokens_max=8), media, api)
    bodies = {case.name: case.body for case in cases}
    assert len(bodies) == len(cases) > 20
    assert max(map(len, bodies.values())) > 0.99 * api.body_bytes_max
    tokens = msgspec.json.decode(bodies["as many tokens as fit"])["prompt"]
    assert len(tokens) + OUTPUT_TOKENS < 1000
    parts = msgspec.json.decode(bodies["the most images"])["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url"] * 3 + ["text"]
    assert "a JPEG of 500 x 500" in bodies
    part = msgspec.json.decode(bodies["the largest embedding"])["messages"][0]["content"][0]
    names = ("embeds", "grid_thw")
    tensors = read_tensors(base64.b64decode(part["image_embeds"]["data"]), names)
    assert set(tensors) == set(names)
