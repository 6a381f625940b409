"""`vsched tune`: core assignments, tried with a real server whose ranks have no model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.unit.bench import idle_plugin
from vsched.bench.tune import (
    ALONE,
    Placement,
    PlacementTrial,
    Tuning,
    choose,
    placements,
    serve_command,
)
from vsched.config import RecordConfig, load_config


def _trial(replicas: int, text: float, image: float) -> PlacementTrial:
    placement = Placement(replicas=replicas, threads=1, encode_threads=1)
    return PlacementTrial(placement=placement, runs={"text": [text], "image": [1.0, image, 900.0]})


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
def test_placements_share_the_cores_and_hold_the_default(cores: int) -> None:
    found = placements(cores, together=True)
    assert len(found) == len(set(found))
    assert all(one.replicas * one.threads <= cores for one in found)
    half = max(cores // 2, 1)
    assert Placement(replicas=1, threads=half, encode_threads=half) in found
    for placement in ("separate", "together"):
        replicas = {one.replicas for one in found if one.placement == placement}
        assert replicas == {n for n in (1, 2, 4, 8) if n <= cores}
    apart = placements(cores, together=False)
    assert apart == [one for one in found if one.placement == "separate"]


def test_choice_weighs_cases_alike_and_needs_a_reason_for_replicas() -> None:
    one, two = _trial(1, 10.0, 10.0), _trial(2, 16.0, 9.0)
    assert (one.rate, two.rate) == pytest.approx((10.0, 12.0))
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


@pytest.mark.parametrize(
    ("limit_s", "rounds"),
    [(0.0, 1), pytest.param(3600.0, 2, marks=pytest.mark.thorough)],
    ids=["time is up", "all"],
)
async def test_split_serves_every_case_of_a_model_without_images(
    limit_s: float, rounds: int
) -> None:
    """As often as time permits, at least once; a run is shorter if there is little time."""
    placement = Placement(replicas=2, threads=1, encode_threads=1)
    sets = ["model.path=.", "server.port=0", "media.images_max=0", "encode.reserved=0"]
    sets += [f"{stage}.plugin={idle_plugin.NAME}" for stage in ("encode", "generate")]
    sets += ["generate.memory.use=pinned", "generate.memory.tokens=65536"]
    config = load_config(None, sets=[*sets, *placement.assignments()], environ={}).config
    tuning = Tuning(splits=1, clients=2, repeats=2, limit_s=limit_s)
    await tuning.measure(placement, config, lambda *_: None)
    assert tuning.requests == {"text": 6 if limit_s else 4}
    (found,) = tuning.trials
    assert len(found.runs["text"]) == rounds
    assert min(found.runs["text"]) > 0


def test_serve_command_keeps_the_settings_of_the_user() -> None:
    found = serve_command("demo", Path("my.toml"), ["model.name=a b", "generate.replicas=2"])
    sets = "--set 'model.name=a b' --set generate.replicas=2"
    assert found == f"vsched serve demo --config my.toml {sets}"


def test_own_servers_ask_for_no_key_and_leave_records_alone() -> None:
    served = ["server.api_key_variable=KEY", "record.path=run.vlog", "record.resume=true"]
    config = load_config(None, sets=[*served, *ALONE], environ={}).config
    assert config.server.api_key_variable == ""
    assert config.record == RecordConfig()
