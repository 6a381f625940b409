"""Requests/s while neighbours come and go: intervals, and the time until the rate is back."""

from __future__ import annotations

import pytest

from tests.bench import timeline

SECONDS = (10, 20, 15)


def rates(before: float, beside: float, after: float, *, late: int = 0) -> list[float]:
    """Return intervals of half a second; the last stretch begins late by some."""
    return [before] * 20 + [beside] * (40 + late) + [after] * (30 - late)


def test_rates_count_each_piece_as_its_share_of_a_request() -> None:
    pieces = [(-0.1, 0.5), (0.0, 0.5), (0.4, 0.5), (0.5, 1.0), (1.9, 0.25), (2.0, 1.0)]
    assert timeline.rates_of(pieces, 2) == [2.0, 2.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("after", "late", "expected"), [(10.0, 0, 0.0), (9.6, 3, 1.5), (9.0, 0, None)]
)
def test_rate_is_back_when_it_holds_95_percent(
    after: float, late: int, expected: float | None
) -> None:
    assert timeline.back_s(rates(10.0, 4.0, after, late=late), SECONDS) == expected
