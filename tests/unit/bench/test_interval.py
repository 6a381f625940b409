from __future__ import annotations

import pytest

from demo_training.interval import Share, wilson_interval


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        # Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_equals_published_values(
    right: int, total: int, low: float, high: float
) -> None:
    assert wilson_interval(right, total) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("right", "total"), [(3, 2), (-1, 2)])
def test_wilson_interval_refuses_invalid_shares(right: int, total: int) -> None:
    with pytest.raises(ValueError, match="not a share"):
        wilson_interval(right, total)


def test_share_is_worded_in_per_cent() -> None:
    assert Share(97, 100).text() == "97.0 (91.5-99.0)"
    assert Share(0, 0).value == 0.0
