"""Settings that the engine takes from the configuration and from the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from tests.unit.media.fakes import model_info
from vsched.assembly import inspect_checkpoint
from vsched.config import Config, load_config
from vsched.engine import Engine
from vsched.types import SamplingDefaults, SamplingParams

DEMO = Path(__file__).parents[2] / "workers" / "demo-model"


@pytest.mark.parametrize(
    ("sets", "temperature"), [((), 0.3), (("model.sampling_defaults=false",), 1.0)]
)
def test_model_section_decides_what_is_taken_from_the_checkpoint(
    tmp_path: Path, sets: tuple[str, ...], temperature: float
) -> None:
    path = shutil.copytree(DEMO, tmp_path / "copy")
    stated = {"eos_token_id": 2, "temperature": 0.3}
    (path / "generation_config.json").write_text(json.dumps(stated))
    chosen = (f"model.path={path}", "model.chat_template=mine.jinja", *sets)
    loaded = load_config(None, sets=chosen, environ={})
    info = inspect_checkpoint(loaded.config, loaded.policies)
    assert info.sampling == SamplingDefaults(temperature=temperature)
    assert info.chat_template == "mine.jinja"


def test_sampling_defaults_come_from_the_checkpoint() -> None:
    engine = Engine(Config())
    engine.info = msgspec.structs.replace(
        model_info(), sampling=SamplingDefaults(temperature=0.3, top_k=5)
    )
    assert engine.default_sampling() == SamplingParams(max_tokens=0, temperature=0.3, top_k=5)
