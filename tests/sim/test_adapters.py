"""Adapters in simulated engines: each request keeps its adapter, whatever happens to ranks while others come and go."""

from __future__ import annotations

from collections import Counter

import pytest

from vsched.kernel import request, request_moves
from vsched.probes import observed
from vsched.sim.cluster.scenario import draw_scenario, run_scenario

SEEDS = (9, 19, 29, 39, 49, 289, 1009, 1029)


def test_requests_keep_to_their_adapters_while_groups_are_lost_and_adapters_change() -> None:
    outcomes: Counter[str] = Counter()
    with observed() as reached:
        for seed in SEEDS:
            scenario = draw_scenario(seed)
            assert scenario.config.adapters.count_max == 3
            report = run_scenario(scenario)
            assert not report.violations, seed
            outcomes.update(report.outcomes)
    assert outcomes["finished"] > 40
    assert reached["adapters.restored"]
    assert reached["adapters.lost_while_adding"]


def test_blocks_that_adapters_share_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = request.root_hash
    monkeypatch.setattr(request_moves, "root_hash", lambda salt, adapter: real(salt))
    assert any(run_scenario(draw_scenario(seed)).violations for seed in SEEDS)
