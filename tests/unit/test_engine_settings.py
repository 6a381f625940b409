"""Settings that the engine takes from the configuration and from the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from vsched.assembly import inspect_checkpoint
from vsched.config import load_config
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
    engine = Engine(loaded.config)
    engine.info = info
    assert engine.default_sampling() == SamplingParams(max_tokens=0, temperature=temperature)
    assert info.chat_template == "mine.jinja"
