"""Engines of models with recurrent states, bidirectional spans, adapters or drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest

from vsched.errors import DeviceOutOfMemory
from vsched.kernel import request, request_moves
from vsched.probes import observed
from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.cluster.scenario import draw_scenario, run_scenario
from vsched.sim.faults import FaultPlan
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.plugin import HYBRID, SEES_IMAGES, SEES_PROMPTS
from vsched.sim.ranks.symbolic_model import DRAFT
from vsched.sim.ranks.symbolic_workers import StandInGenerator
from vsched.sim.workload.requests import Arrival, Text
from vsched.worker.drafts import DraftModel

Engines = Callable[..., SimEngine]


@pytest.mark.sim(seeds=2)
@pytest.mark.parametrize(
    "places", [1, *(pytest.param(places, marks=pytest.mark.thorough) for places in (0, 4))]
)
async def test_states_survive_whatever_happens(
    sim_engine: Engines, workload: tuple[Arrival, ...], faults: FaultPlan, places: int
) -> None:
    """Requests share prefixes, are preempted, and lose their ranks; a rank reports a wrong state."""
    config = small_config(model={"path": HYBRID}, generate={"state_snapshots": places})
    async with sim_engine(config, faults=faults) as engine:
        await engine.run(workload)
        await engine.heal()
        assert places or not engine.engine.statistics()["generate"]["tokens_cached"]


@pytest.mark.sim(seeds=2)
@pytest.mark.parametrize("path", [SEES_IMAGES, SEES_PROMPTS])
async def test_bidirectional_spans_are_never_split(
    sim_engine: Engines, workload: tuple[Arrival, ...], faults: FaultPlan, path: str
) -> None:
    """Chunks are smaller than images, requests are preempted and lose their ranks; observers check every decision."""
    room = 72 if path == SEES_IMAGES else 260
    config = small_config(model={"path": path}, generate={"max_batch_tokens": room})
    async with sim_engine(config, faults=faults) as engine:
        await engine.run(workload)
        await engine.heal()
        statistics = engine.engine.statistics()
        assert statistics["generate"]["admitted"] > 0
        assert path == SEES_IMAGES or not statistics["generate"]["tokens_cached"]


ADAPTER_SEEDS = (9, 19, 29, 39, 49, 289, 1009, 1029)


def play_all(seeds: Sequence[int]) -> Counter[str]:
    """Play scenarios without violations; return the number of requests by outcome."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        report = run_scenario(draw_scenario(seed))
        assert not report.violations, (seed, report.violations)
        outcomes.update(report.outcomes)
    return outcomes


@pytest.mark.thorough
def test_requests_keep_to_their_adapters_while_groups_are_lost_and_adapters_change() -> None:
    assert {draw_scenario(seed).config.adapters.count_max for seed in ADAPTER_SEEDS} == {3}
    with observed() as reached:
        assert play_all(ADAPTER_SEEDS)["finished"] > 40
    assert reached["adapters.restored"]
    assert reached["adapters.lost_while_adding"]


DRAFT_SEEDS = (*range(5, 125, 10), 1005, 1015, 1025)


@pytest.mark.thorough
def test_requests_get_their_tokens_while_groups_are_lost_and_drafts_are_wrong() -> None:
    for seed in DRAFT_SEEDS:
        assert draw_scenario(seed).config.generate.draft_model.startswith(DRAFT)
    assert play_all(DRAFT_SEEDS)["finished"] > 60


@pytest.mark.parametrize(
    ("place", "name", "wrong", "seeds"),
    [
        (request_moves, "root_hash", lambda salt, adapter: request.root_hash(salt), ADAPTER_SEEDS),
        pytest.param(DraftModel, "renew", lambda *_: None, DRAFT_SEEDS, marks=pytest.mark.thorough),
        pytest.param(DraftModel, "leave", lambda *_: None, DRAFT_SEEDS, marks=pytest.mark.thorough),
    ],
    ids=["blocks shared by adapters", "drafts of old blocks", "drafts of blocks left"],
)
def test_blocks_of_others_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    name: str,
    wrong: Callable[..., object],
    seeds: Sequence[int],
) -> None:
    """A draft model that reads blocks of another request finds wrong KV."""
    monkeypatch.setattr(place, name, wrong)
    assert any(run_scenario(draw_scenario(seed)).violations for seed in seeds)


@pytest.mark.sim
@pytest.mark.parametrize(("acceptance", "least", "most"), [(1.0, 0.95, 1.0), (0.5, 0.2, 0.8)])
async def test_drafts_prove_right_as_often_as_is_said(
    sim_engine: Engines, workload: tuple[Arrival, ...], acceptance: float, least: float, most: float
) -> None:
    drafting = {"use": "draft-model", "gain_min": 0.0, "speedup_min": 0.0, "tokens": 2}
    generate = {"draft_model": f"{DRAFT} {acceptance}", "drafting": drafting}
    texts = tuple(
        msgspec.structs.replace(one, prompt=(Text(number, 9),), output_tokens=30, conversation="")
        for number, one in enumerate(workload)
    )
    async with sim_engine(small_config(generate=generate)) as engine:
        await engine.run(texts)
        counts = engine.engine.statistics()["generate"]
    assert counts["tokens_drafted"] > 20
    assert least <= counts["drafts_accepted"] / counts["tokens_drafted"] <= most


def test_stand_in_without_room_for_its_states_keeps_no_kv_cache() -> None:
    """Otherwise a memory policy that tries a smaller one finds a leak that no real worker has."""
    memory = SimulatedMemory(64 << 20)
    worker = StandInGenerator(memory, kv_bytes_per_token=1 << 20, state_bytes=48 << 20)
    with pytest.raises(DeviceOutOfMemory):
        worker.build_kv(blocks=4, block_size=8)
    worker.drop_kv()
    assert memory.allocated() == 0
