"""The size arithmetic of the Qwen-VL processors and the clamp that bounds it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.workers.properties import REPEATABLE
from vsched.errors import RequestRefused
from vsched.worker.contract import PixelBounds
from vsched_workers.families.qwen_image import (
    ASPECT_RATIO_MAX,
    ResizeLimits,
    bounded_limits,
    clamp_limits,
    minimum_tokens_for,
    resized,
    worst_tokens,
)

FACTOR = 28
AREA = FACTOR * FACTOR

sides = st.integers(min_value=1, max_value=30_000)
token_counts = st.integers(min_value=1, max_value=20_000)


def legal(height: int, width: int) -> bool:
    return max(height, width) / min(height, width) <= ASPECT_RATIO_MAX


@given(height=sides, width=sides, low=token_counts, high=token_counts, odd=st.integers(0, AREA - 1))
@REPEATABLE
def test_resized_agrees_with_the_processor(
    height: int, width: int, low: int, high: int, odd: int
) -> None:
    """Preprocessing and processor agree on every size, to the last rounding."""
    assume(legal(height, width))
    minimum, maximum = low * AREA, high * AREA + odd
    assert resized(
        height, width, factor=FACTOR, limits=ResizeLimits(minimum, maximum)
    ) == smart_resize(height, width, FACTOR, minimum, maximum)


@given(
    height=sides,
    width=sides,
    budget=st.integers(1, 3000),
    low=token_counts,
    high=st.none() | token_counts,
)
@REPEATABLE
def test_clamped_images_stay_within_the_budget_or_are_strips(
    height: int, width: int, budget: int, low: int, high: int | None
) -> None:
    """Tokens <= budget over all sizes and budgets, except strips that the preprocessing refuses.

    Only images whose aspect ratio exceeds the budget can have more.
    """
    assume(legal(height, width))
    limits = clamp_limits(
        ResizeLimits(low * AREA, None if high is None else high * AREA),
        tokens=budget,
        factor=FACTOR,
    )
    rows, columns = resized(height, width, factor=FACTOR, limits=limits)
    tokens = rows * columns // AREA
    worst = worst_tokens(limits, factor=FACTOR)
    assert worst is not None
    assert 1 <= tokens <= worst
    if tokens > budget:
        assert max(height, width) / min(height, width) > budget


@given(budget=st.integers(1, 100_000))
@REPEATABLE
def test_minimum_tokens_for_is_safe_at_the_extreme_ratio(budget: int) -> None:
    """The ceilings of an enlarged image stay within the budget if a single token does."""
    least = minimum_tokens_for(budget)
    assert 1 <= least <= budget
    for width in (1, 50, 100, 150, 199, 200):
        rows, columns = resized(1, width, factor=FACTOR, limits=ResizeLimits(least * AREA, None))
        if least > 1:
            assert rows * columns <= budget * AREA


def test_minimum_is_untouched_by_a_wide_budget() -> None:
    """The published minimum of 64 tokens is kept for every budget from 179 on."""
    limits = ResizeLimits(64 * AREA, 16384 * AREA)
    assert clamp_limits(limits, tokens=179, factor=FACTOR).minimum == 64 * AREA
    assert clamp_limits(limits, tokens=64, factor=FACTOR).minimum < 64 * AREA


def test_worst_tokens_counts_the_strips_of_a_small_maximum() -> None:
    """At 64 tokens a strip of 1:200 has 113; unknown without a maximum."""
    assert worst_tokens(ResizeLimits(1, None), factor=FACTOR) is None
    limits = ResizeLimits(AREA, 64 * AREA)
    rows, columns = resized(100, 20_000, factor=FACTOR, limits=limits)
    assert rows * columns // AREA == 113
    assert worst_tokens(limits, factor=FACTOR) == 113


MEASURED = ResizeLimits(4 * AREA, 100 * AREA)


def within(
    least: int | None, most: int | None, *, tokens: int = 100, pixels_max: int = 10**9
) -> ResizeLimits:
    return bounded_limits(
        MEASURED, PixelBounds(least, most), tokens=tokens, factor=FACTOR, pixels_max=pixels_max
    )


def test_bounds_of_a_request_replace_those_of_the_checkpoint() -> None:
    assert within(None, 50 * AREA) == ResizeLimits(4 * AREA, 50 * AREA)
    assert within(9 * AREA, None) == ResizeLimits(9 * AREA, 100 * AREA)
    assert within(100 * AREA, 100 * AREA) == ResizeLimits(100 * AREA, 100 * AREA)


@pytest.mark.parametrize(
    ("least", "most", "message"),
    [
        (None, 101 * AREA, f"max_pixels .* value {101 * AREA} pixels, limit {4 * AREA} to"),
        (None, 4 * AREA - 1, "max_pixels .* out of bounds"),
        (4 * AREA - 1, None, f"min_pixels .* limit {4 * AREA} to {100 * AREA} pixels"),
        (101 * AREA, None, "min_pixels .* out of bounds"),
        (60 * AREA, 50 * AREA, f"min_pixels .* limit {50 * AREA} pixels, which is max_pixels"),
    ],
)
def test_bounds_beyond_the_measured_ones_are_refused(
    least: int | None, most: int | None, message: str
) -> None:
    with pytest.raises(RequestRefused, match=message + r".*Remedy: ") as refused:
        within(least, most)
    assert (refused.value.code, refused.value.status) == ("pixel_bounds_invalid", 400)


@given(
    shorter=st.integers(1, 150),
    ratio=st.floats(1, ASPECT_RATIO_MAX),
    least=st.integers(4, 100),
    more=st.integers(0, 100_000),
)
@REPEATABLE
def test_images_are_not_raised_above_the_admitted_size(
    shorter: int, ratio: float, least: int, more: int
) -> None:
    """Encoder memory was measured with images of at most this many pixels before resizing."""
    height, width = shorter, int(shorter * ratio)
    let_in = height * width + more
    try:
        limits = within(least * AREA, None, pixels_max=let_in)
    except RequestRefused:
        assert least > minimum_tokens_for(max(1, let_in // AREA))
        return
    rows, columns = resized(height, width, factor=FACTOR, limits=limits)
    native = resized(height, width, factor=FACTOR, limits=MEASURED)
    assert rows * columns <= max(let_in, native[0] * native[1], 4 * AREA)
