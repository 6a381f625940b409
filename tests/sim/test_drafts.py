"""Draft models in simulated engines: whatever happens to ranks, blocks and slots, each request gets its tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.cluster.scenario import draw_scenario, run_scenario
from vsched.sim.ranks.symbolic_model import DRAFT, drafted_token, extend, next_token
from vsched.sim.workload.requests import Arrival, Text
from vsched.worker.drafts import DraftModel

SEEDS = (*range(5, 125, 10), 1005, 1015, 1025)


def test_a_drafted_token_is_right_as_often_as_is_said() -> None:
    seen = [extend(number, 7) for number in range(2000)]
    for acceptance in (0.0, 0.3, 1.0):
        right = sum(drafted_token(one, acceptance) == next_token(one) for one in seen)
        assert abs(right / len(seen) - acceptance) < 0.03


def test_requests_get_their_tokens_while_groups_are_lost_and_drafts_are_wrong() -> None:
    outcomes: Counter[str] = Counter()
    for seed in SEEDS:
        scenario = draw_scenario(seed)
        assert scenario.config.generate.draft_model.startswith(DRAFT)
        report = run_scenario(scenario)
        assert not report.violations, (seed, report.violations)
        outcomes.update(report.outcomes)
    assert outcomes["finished"] > 60


@pytest.mark.parametrize("forgotten", ["renew", "leave"])
def test_drafts_from_what_lies_in_another_block_are_noticed(
    monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """A draft model that reads blocks of another request finds wrong KV."""
    monkeypatch.setattr(DraftModel, forgotten, lambda *_: None)
    assert any(run_scenario(draw_scenario(seed)).violations for seed in SEEDS)


@pytest.mark.sim
@pytest.mark.parametrize(("acceptance", "least", "most"), [(1.0, 0.95, 1.0), (0.5, 0.2, 0.8)])
async def test_drafts_prove_right_as_often_as_is_said(
    sim_engine: Any, workload: tuple[Arrival, ...], acceptance: float, least: float, most: float
) -> None:
    base = small_config()
    drafting = {"use": "draft-model", "gain_min": 0.0, "speedup_min": 0.0, "tokens": 2}
    generate = msgspec.structs.replace(
        base.generate, draft_model=f"{DRAFT} {acceptance}", drafting=drafting
    )
    texts = tuple(
        msgspec.structs.replace(one, prompt=(Text(number, 9),), output_tokens=30, conversation="")
        for number, one in enumerate(workload)
    )
    engine: SimEngine
    async with sim_engine(msgspec.structs.replace(base, generate=generate)) as engine:
        await engine.run(texts)
        counts = engine.engine.statistics()["generate"]
    assert counts["tokens_drafted"] > 20
    assert least <= counts["drafts_accepted"] / counts["tokens_drafted"] <= most
