"""`placement = "auto"`: the rule over many machines, and its use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.machines import pretend_cores
from vsched.config import Config, load_config
from vsched.config.devices import HEAVY_BYTES, choose_placement, placed, placement_here

TINY, MID = 10 << 20, 800 << 20


def config_of(*sets: str) -> Config:
    return load_config(None, sets=sets, environ={}).config


@pytest.mark.parametrize(
    ("sets", "weights_bytes", "cores", "expected", "why"),
    [
        *(((), MID, cores, "together", f"share of {cores} cores") for cores in (1, 2, 4, 8)),
        ((), MID, 64, "separate", "64 cores are enough"),
        *(((), TINY, cores, "separate", "weights of 10 MiB are light") for cores in (1, 2, 8)),
        ((), HEAVY_BYTES, 2, "together", "weights of 256 MiB"),
        ((), HEAVY_BYTES - 1, 2, "separate", "light"),
        (("placement=separate",), MID, 2, "separate", "configured"),
        (("placement=together",), TINY, 64, "together", "configured"),
        (("generate.threads=1",), MID, 2, "separate", "threads are configured"),
        (("encode.threads=1",), MID, 2, "separate", "threads are configured"),
        (("generate.replicas=2",), MID, 2, "separate", "stages differ"),
        (("generate.tensor_parallel=2",), MID, 2, "separate", "stages differ"),
        (("encode.device=cuda:0",), MID, 2, "separate", "device of its own"),
        (("generate.device=cuda:0",), MID, 2, "separate", "device of its own"),
        (("encode.replicas=0",), MID, 2, "separate", "nothing encodes"),
    ],
)
def test_placement_follows_machine_checkpoint_and_settings(
    sets: tuple[str, ...], weights_bytes: int, cores: int, expected: str, why: str
) -> None:
    found = choose_placement(config_of(*sets), weights_bytes=weights_bytes, cores=cores)
    assert found.placement == expected
    assert why in found.reason
    assert str(found).startswith(f"placement = {expected}, because {found.reason}")


@pytest.mark.parametrize(
    ("sets", "weights_bytes", "cores"),
    [
        ((), MID, 2),
        ((), TINY, 1),
        ((), TINY, 64),
        (("placement=separate",), TINY, 2),
        (("generate.threads=1",), TINY, 2),
        (("encode.replicas=2", "generate.replicas=2"), TINY, 2),
    ],
)
def test_placement_advises_replicas_only_where_they_were_worth_it(
    sets: tuple[str, ...], weights_bytes: int, cores: int
) -> None:
    """The advice names settings; once they are set, there is none."""
    reported = str(choose_placement(config_of(), weights_bytes=TINY, cores=2))
    named = re.findall(r"--set (\S+)", reported)
    assert config_of(*named).generate.replicas == config_of(*named).encode.replicas == 2
    found = choose_placement(config_of(*sets), weights_bytes=weights_bytes, cores=cores)
    assert not found.advice
    assert not choose_placement(config_of(*named), weights_bytes=TINY, cores=2).advice


def test_placement_is_that_of_the_weights_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cores(monkeypatch, 2)
    config = config_of(f"model.path={tmp_path}")
    assert placed(config).placement == "separate"
    for part in range(2):
        with (tmp_path / f"model-{part}.safetensors").open("wb") as file:
            file.truncate(HEAVY_BYTES // 2)
    assert placement_here(config).placement == "together"
    assert placed(config).placement == "together"
    assert placed(config_of(f"model.path={tmp_path}", "placement=separate")).placement == "separate"
