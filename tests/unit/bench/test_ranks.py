"""`python -m tests.bench.parts ranks` over real processes."""

from __future__ import annotations

import pytest

from tests.bench.parts.ranks.measure import PAUSES_S, WAYS, measure_ranks


@pytest.mark.slow
async def test_ranks_bench_measures_every_way() -> None:
    """The digest is checked on the measured transport; all transports and pauses have their row."""
    advanced: list[None] = []
    rows = await measure_ranks(messages=40, rounds=2, advanced=lambda: advanced.append(None))
    assert [(row.way, row.pause_ms) for row in rows] == [
        (way, pause_s * 1e3) for pause_s in PAUSES_S for way in WAYS
    ]
    assert len(advanced) == 2 * len(rows)
    for row in rows:
        assert 0 < row.spread_us[0] <= row.p50_us <= row.p99_us
        assert row.spread_us[0] <= row.p50_us <= row.spread_us[1]
        assert row.messages == (20 if row.pause_ms else 40)
