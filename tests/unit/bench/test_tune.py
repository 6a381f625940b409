"""`vsched tune`: core assignments, tried with a real server whose ranks have no model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.unit.bench import idle_plugin
from vsched.bench.load.client_processes import LoadOrder
from vsched.bench.load.shapes import Case
from vsched.bench.tune.measure import (
    Placement,
    PlacementTrial,
    RunPlan,
    Tuning,
    choose,
    orders_of,
    placements,
    plan_runs,
    served,
    shares,
)
from vsched.config import load_config


def _trial(replicas: int, text: float, image: float) -> PlacementTrial:
    placement = Placement(replicas=replicas, threads=1, encode_threads=1)
    rates = {"text": text, "image": image}
    return PlacementTrial(
        placement=placement, requests_s=rates, runs={k: [v] for k, v in rates.items()}
    )


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
def test_placements_share_the_cores_and_hold_the_default(cores: int) -> None:
    found = placements(cores, together=True)
    assert len(found) == len(set(found))
    assert all(one.replicas * one.threads <= cores for one in found)
    assert (
        Placement(replicas=1, threads=max(cores // 2, 1), encode_threads=max(cores // 2, 1))
        in found
    )
    for placement in ("separate", "together"):
        replicas = {one.replicas for one in found if one.placement == placement}
        assert replicas == {n for n in (1, 2, 4, 8) if n <= cores}
    apart = placements(cores, together=False)
    assert apart == [one for one in found if one.placement == "separate"]


def test_choice_weighs_cases_alike_and_needs_a_reason_for_replicas() -> None:
    one, two = _trial(1, 10.0, 10.0), _trial(2, 16.0, 9.0)
    assert shares([one, two]) == pytest.approx([(10 / 16) ** 0.5, 0.9**0.5])
    assert choose([one, two]) is two
    assert choose([one, _trial(2, 10.2, 10.2)]) is one
    assert choose([_trial(2, 10.2, 10.2), one]) is one


@pytest.mark.parametrize(("where", "encoders"), [("separate", 1), ("together", 4)])
def test_placement_is_configuration(
    tmp_path: Path, where: Literal["separate", "together"], encoders: int
) -> None:
    placement = Placement(replicas=4, threads=2, encode_threads=3, placement=where)
    written = tmp_path / "tuned.toml"
    written.write_text(placement.toml())
    by_file = load_config(written, sets=["model.path=."], environ={}).config
    by_sets = load_config(None, sets=["model.path=.", *placement.assignments()], environ={}).config
    assert by_file == by_sets
    assert by_sets.placement == where
    assert (by_sets.generate.replicas, by_sets.generate.threads) == (4, 2)
    assert (by_sets.encode.replicas, by_sets.encode.threads) == (encoders, 3)


async def test_trial_serves_every_load_as_often_as_asked() -> None:
    placement = Placement(replicas=2, threads=1, encode_threads=1)
    sets = ["model.path=.", "server.port=0", "media.images_max=0", "encode.reserved=0"]
    sets += [f"{stage}.plugin={idle_plugin.NAME}" for stage in ("encode", "generate")]
    sets += ["generate.memory.use=pinned", "generate.memory.tokens=65536"]
    config = load_config(None, sets=[*sets, *placement.assignments()], environ={}).config
    done: list[int] = []
    tuning = Tuning(orders_of([Case.TEXT], 2), ways=1, repeats=2, limit_s=3600.0)
    async with served(config, on_progress=lambda *_: None) as run:
        plan = await tuning.probe(run, start_s=0.1)
        found = await tuning.measure(placement, run, on_run=done.append)
    assert (plan.requests, plan.repeats) == ({"text": 6}, 2)
    assert done == [1, 2]
    assert len(found.runs["text"]) == 2
    assert min(found.runs["text"]) <= found.requests_s["text"] <= max(found.runs["text"])
    assert min(found.runs["text"]) > 0


def planned(text: float, image: float, *, limit_s: float, start_s: float = 10.0) -> RunPlan:
    rates = {"text": text, "image": image}
    return plan_runs(rates, start_s=start_s, ways=5, clients=16, repeats=3, limit_s=limit_s)


def test_plan_has_runs_as_long_as_there_is_time_for() -> None:
    """A fast model has all; a slow one fewer requests and repeats, and as many assignments."""
    fast = planned(40.0, 30.0, limit_s=300.0)
    assert (fast.requests, fast.repeats) == ({"text": 48, "image": 48}, 3)
    assert fast.seconds == pytest.approx(5 * (10 + 3 * (2 + 48 / 40 + 2 + 48 / 30)))
    slow = planned(0.8, 0.6, limit_s=300.0, start_s=20.0)
    assert slow.repeats == 1
    assert slow.requests == {"text": 14, "image": 10}
    assert 280 < slow.seconds <= 300
    hopeless = planned(0.01, 0.01, limit_s=60.0)
    assert (hopeless.requests, hopeless.repeats) == ({"text": 4, "image": 4}, 1)


class FakeServer:
    """Serves at given rates, on a clock of its own."""

    def __init__(self, **rates: float) -> None:
        self.rates = rates
        self.now_s = 0.0
        self.served: list[tuple[str, int, int]] = []

    async def __call__(self, order: LoadOrder) -> float:
        rate = self.rates[order.case.value]
        self.now_s += order.requests / rate
        self.served.append((order.case.value, order.clients, order.requests))
        return rate


async def started(limit_s: float, **rates: float) -> tuple[Tuning, FakeServer]:
    server = FakeServer(**rates)
    orders = orders_of([Case.TEXT, Case.IMAGE], 8)
    tuning = Tuning(orders, ways=3, repeats=3, limit_s=limit_s, clock=lambda: server.now_s)
    await tuning.probe(server, start_s=5.0)
    await tuning.measure(Placement(replicas=1, threads=1, encode_threads=1), server)
    return tuning, server


async def test_way_that_cannot_win_is_given_up() -> None:
    """After its first case if that suffices, whatever the other would be; one that lost requests is never chosen."""
    tuning, server = await started(600.0, text=10.0, image=10.0)
    assert [len(runs) for runs in tuning.trials[0].runs.values()] == [3, 3]
    server.rates = {"text": 4.0, "image": 1000.0}
    lost = await tuning.measure(Placement(replicas=2, threads=1, encode_threads=1), server)
    assert lost.runs == {"text": [4.0], "image": []}
    assert lost.ended == "given up: 71% of the best at most"
    server.rates = {"text": 9.0, "image": 5.0}
    late = await tuning.measure(Placement(replicas=3, threads=1, encode_threads=1), server)
    assert late.runs == {"text": [9.0], "image": [5.0]}
    server.rates = {"text": 9.0, "image": 14.0}
    won = await tuning.measure(Placement(replicas=4, threads=1, encode_threads=1), server)
    assert not won.ended
    assert choose(tuning.trials) is won


async def test_time_is_kept_and_every_way_that_was_begun_can_be_judged() -> None:
    tuning, server = await started(60.0, text=2.0, image=2.0)
    assert tuning.plan is not None
    assert tuning.plan.repeats == 1
    assert tuning.has_time()
    server.rates = {"text": 1.9, "image": 1.9}
    server.now_s = 52.0
    assert not tuning.has_time()
    slower = await tuning.measure(Placement(replicas=2, threads=1, encode_threads=1), server)
    assert slower.is_whole, "each load was served once"


async def test_runs_end_when_time_is_up() -> None:
    tuning, server = await started(600.0, text=10.0, image=10.0)
    server.now_s = 599.0
    found = await tuning.measure(Placement(replicas=2, threads=1, encode_threads=1), server)
    assert found.ended == "time was up"
    assert [len(runs) for runs in found.runs.values()] == [1, 1]
    assert found.is_whole
