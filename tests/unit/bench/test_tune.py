"""`vsched tune`: ways to share the cores, tried with a real server whose ranks have no model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.unit.bench import idle_plugin
from vsched.bench.load.shapes import Case
from vsched.bench.tune.measure import (
    Placement,
    PlacementTrial,
    choose,
    measure_placement,
    orders_of,
    placements,
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
    found = await measure_placement(
        placement,
        config,
        orders_of([Case.TEXT], 2),
        repeats=2,
        on_progress=lambda *_: None,
        on_run=done.append,
    )
    assert done == [1, 2]
    assert len(found.runs["text"]) == 2
    assert min(found.runs["text"]) <= found.requests_s["text"] <= max(found.runs["text"])
    assert min(found.runs["text"]) > 0
