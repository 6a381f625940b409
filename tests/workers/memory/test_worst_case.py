"""The search for the worst legal batch of images."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.properties import REPEATABLE
from vsched.worker.contract import ImagePlan
from vsched_workers.families.qwen_image import (
    ASPECT_RATIO_MAX,
    ResizeLimits,
    clamp_limits,
    grid_of,
    largest_units,
    resized,
)
from vsched_workers.memory.worst_case import compose, worst_batches
from vsched_workers.plugin import plugin


def every_unit(
    limits: ResizeLimits, *, factor: int, tokens_max: int, pixels_max: int
) -> dict[int, int]:
    """Try every legal image."""
    found: dict[int, int] = {}
    for short in range(1, math.isqrt(pixels_max) + 1):
        for long in range(short, min(ASPECT_RATIO_MAX * short, pixels_max // short) + 1):
            rows, columns = resized(short, long, factor=factor, limits=limits)
            few, many = sorted((rows // factor, columns // factor))
            if not tokens_max or few * many <= tokens_max:
                found[few] = max(found.get(few, 0), many)
    return found


@given(
    factor=st.integers(2, 8),
    pixels_max=st.integers(1, 1200),
    budget=st.sampled_from([0, 1, 4, 9, 30, 64]),
    capped=st.booleans(),
    minimum=st.integers(1, 70),
    maximum=st.one_of(st.none(), st.integers(1, 6000)),
)
@REPEATABLE
def test_largest_units_equal_trying_every_image(
    factor: int, pixels_max: int, budget: int, capped: bool, minimum: int, maximum: int | None
) -> None:
    """Exactly the reach of legal images under all limits together."""
    limits = ResizeLimits(minimum=minimum * factor, maximum=maximum)
    limits = clamp_limits(limits, tokens=budget, factor=factor)
    tokens_max = budget if capped else 0
    found = largest_units(limits, factor=factor, tokens_max=tokens_max, pixels_max=pixels_max)
    wanted = every_unit(limits, factor=factor, tokens_max=tokens_max, pixels_max=pixels_max)
    assert found == wanted


def test_largest_units_find_the_strip_that_guesses_miss() -> None:
    """At 3,686,400 pixels, patch 14, merge 2: a square has 4,761 tokens, 154 x 23937 pixels have 5,130."""
    found = largest_units(ResizeLimits(3136, None), factor=28, tokens_max=0, pixels_max=3_686_400)
    assert max(few * many for few, many in found.items()) >= 5130
    assert found[6] == 855


@pytest.mark.parametrize("pixels_max", [997, 7919, 104_729, 1_299_709])
def test_largest_units_of_a_prime_are_legal(pixels_max: int) -> None:
    """Each is the grid of an image that the processor accepts."""
    limits = ResizeLimits(1, None)
    for few, many in largest_units(limits, factor=28, tokens_max=0, pixels_max=pixels_max).items():
        # Rounding raises a side by at most half a factor, so the original sides were within the ratio.
        assert (many - 0.5) / (few + 0.5) < ASPECT_RATIO_MAX
        assert (few - 0.5) * (many - 0.5) * 28 * 28 <= pixels_max


@pytest.fixture
def batches(checkpoints: Callable[[str], Path], size: str) -> Callable[..., list[list[ImagePlan]]]:
    info = plugin.inspect(str(checkpoints(size)), dtype="auto", item_tokens_max=0)

    def search(
        *, items: int, tokens: int, pixels_max: int, item_tokens_max: int
    ) -> list[list[ImagePlan]]:
        capped = msgspec.structs.replace(info, item_tokens_max=item_tokens_max)
        return worst_batches(capped, items=items, tokens=tokens, pixels_max=pixels_max)

    return search


@pytest.mark.parametrize(
    ("items", "tokens", "pixels_max", "item_tokens_max"),
    [(8, 200, 64_000_000, 200), (3, 200, 64_000_000, 60), (8, 4, 64_000_000, 4), (2, 90, 9000, 64)],
    ids=["budget", "count", "a few tokens", "pixels"],
)
def test_worst_batches_stay_within_every_cap(
    batches: Callable[..., list[list[ImagePlan]]],
    items: int,
    tokens: int,
    pixels_max: int,
    item_tokens_max: int,
) -> None:
    """Multiples of the merge size, at least one unit, and no limit is exceeded."""
    found = batches(
        items=items, tokens=tokens, pixels_max=pixels_max, item_tokens_max=item_tokens_max
    )
    assert found
    for batch in found:
        assert 1 <= len(batch) <= items
        assert sum(plan.tokens for plan in batch) <= tokens
        for plan in batch:
            frames, rows, columns = grid_of(plan.metadata)
            assert min(rows, columns) >= 2
            assert (rows % 2, columns % 2) == (0, 0)
            assert plan.tokens == frames * rows * columns // 4 <= item_tokens_max


def test_worst_batches_use_the_budget_up(
    batches: Callable[..., list[list[ImagePlan]]],
) -> None:
    """The tighter limit binds, and the rest of the budget is used."""
    caps = {"pixels_max": 64_000_000, "item_tokens_max": 64}
    full = batches(items=8, tokens=200, **caps)
    assert max(sum(plan.tokens for plan in batch) for batch in full) >= 196
    assert max(plan.tokens for batch in full for plan in batch) == 64
    assert max(len(batch) for batch in full) == 8
    few = batches(items=2, tokens=200, **caps)
    assert max(sum(plan.tokens for plan in batch) for batch in few) == 128
    small = batches(items=8, tokens=200, pixels_max=3000, item_tokens_max=64)
    assert max(plan.tokens for batch in small for plan in batch) < 64


def test_worst_batches_without_a_token_budget_fill_the_count(
    batches: Callable[..., list[list[ImagePlan]]],
) -> None:
    """Then only the count limits."""
    found = batches(items=3, tokens=0, pixels_max=64_000_000, item_tokens_max=64)
    assert [plan.tokens for plan in found[0]] == [64, 64, 64]


def test_worst_batches_let_an_image_above_the_budget_run_alone(
    batches: Callable[..., list[list[ImagePlan]]],
) -> None:
    """It is encoded, so it is a candidate."""
    found = batches(items=8, tokens=40, pixels_max=64_000_000, item_tokens_max=64)
    assert [plan.tokens for plan in found[0]] == [64]
    for batch in found:
        assert len(batch) == 1 or sum(plan.tokens for plan in batch) <= 40


def test_worst_batches_of_no_images_are_none(
    batches: Callable[..., list[list[ImagePlan]]],
) -> None:
    assert batches(items=8, tokens=40, pixels_max=0, item_tokens_max=64) == []


def test_compose_tries_strips_where_they_are_something_else() -> None:
    """The longest image is a candidate, too, unless it is about as large as the largest."""
    found = compose({1: 60, 8: 10}, least=1, items=4, tokens=100)
    assert [batch[0] for batch in found] == [(8, 10), (1, 25), (1, 60)]
    assert len(compose({1: 79, 8: 10}, least=1, items=4, tokens=100)) == 2


def test_compose_names_each_candidate_once() -> None:
    found = compose({1: 1}, least=1, items=1, tokens=1)
    assert found == [[(1, 1)]]


def test_worst_batches_do_not_heed_the_environment(
    batches: Callable[..., list[list[ImagePlan]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment variables of other servers have no effect."""
    caps = {"items": 8, "tokens": 200, "pixels_max": 64_000_000, "item_tokens_max": 64}
    before = batches(**caps)
    for name in ("MAX_PIXELS", "MIN_PIXELS", "VIT_MAX_BATCH", "IMAGE_MAX_TOKEN_NUM"):
        monkeypatch.setenv(name, "1")
    assert batches(**caps) == before
