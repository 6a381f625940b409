"""Requests of a calibration stay within the engine's limits and the budget."""

from __future__ import annotations

import pytest

from vsched.bench.fidelity.calibration import (
    ROUND_COST_MIN,
    CalibrationLimits,
    plan_round,
)

LARGE = CalibrationLimits(
    slots=64,
    kv_tokens=65536,
    context_tokens=32768,
    item_tokens=1280,
    images=64,
    pixel_tokens=14000,
)
PLENTY = 1e9


def limits(**changes: int) -> CalibrationLimits:
    return CalibrationLimits(
        **{**{name: getattr(LARGE, name) for name in LARGE.__slots__}, **changes}
    )


def test_round_has_everything_that_has_a_price() -> None:
    trials = plan_round(LARGE, PLENTY)
    asks = [ask for trial in trials for ask in trial.asks]
    assert {len(ask.images) for ask in asks} >= {0, 1, 2, 4, 8}
    assert max(len(trial.asks) for trial in trials) == 64
    assert max(ask.text for ask in asks) == 8192
    assert [len(trial.beside) for trial in trials if trial.beside] == [1, 1, 8, 8]
    assert any(ask.outputs > 1 for ask in asks)


@pytest.mark.parametrize(
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
        assert tight.fit([*trial.asks, *trial.beside])
        assert len(trial.asks) + len(trial.beside) <= tight.slots
        for ask in (*trial.asks, *trial.beside):
            assert ask.prompt + ask.outputs < tight.context_tokens
            assert all(tokens <= tight.item_tokens for tokens in ask.images)


def test_round_costs_what_it_may_and_the_cheapest_come_first() -> None:
    trials = [one for one in plan_round(LARGE, 20_000) if not one.beside]
    costs = [trial.cost for trial in trials]
    assert costs == sorted(costs)
    assert ROUND_COST_MIN < sum(costs) <= 20_000
    few = [one for one in plan_round(LARGE, 1) if not one.beside]
    assert 0 < sum(one.cost for one in few) <= ROUND_COST_MIN
    assert any(ask.images for trial in few for ask in trial.asks)
