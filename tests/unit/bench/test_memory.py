"""`python -m tests.bench.parts memory`: a load within the checkpoint's limits, and the verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.bench.parts import memory
from tests.bench.parts.memory import MemoryRun, Verdict, default_settings
from vsched.assembly import context_tokens, inspect_checkpoint
from vsched.config import load_config
from vsched.config.policies import resolve_policies

DEMO = str(Path(__file__).parents[3] / "workers" / "demo-model")


def memory_run(**changes: Any) -> MemoryRun:
    given = {"policy": "one", "limit_bytes": 1 << 30, "kv_tokens": 4096, "start_s": 1.0}
    return MemoryRun(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"served": 3}, "kept"),
        ({"served": 3, "lost": {"group_lost": 1}}, "broken"),
        ({"served": 3, "losses": 1}, "broken"),
        ({"lost": {"encode_failed": 1}}, "broken"),
        ({"kv_tokens": 0, "failure": "no room"}, "no start"),
        ({}, "inconclusive"),
        ({"refusals": {"too_large": 5}}, "inconclusive"),
    ],
)
def test_memory_run_reports_no_more_than_was_seen(
    changes: dict[str, Any], verdict: Verdict
) -> None:
    """If nothing finished, the result is inconclusive."""
    assert memory_run(**changes).verdict == verdict


def test_memory_load_fits_the_context_of_the_demo_model() -> None:
    """The model was trained for less than 8,192 tokens; an image may take half of them."""
    config = load_config(None, sets=default_settings(DEMO), environ={}).config
    info = inspect_checkpoint(config, resolve_policies(config))
    assert context_tokens(config, info) == info.context_tokens == 4096
    assert config.generate.max_batch_tokens == 2048


def test_memory_command_reports_inconclusive_if_nothing_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the screen and in the JSON."""

    async def measured(settings: list[str], *, policy: str, **_: Any) -> MemoryRun:
        assert f"model.path={DEMO}" in settings
        return memory_run(policy=policy)

    monkeypatch.setattr(memory, "measure_memory", measured)
    out = tmp_path / "memory.json"
    words = [DEMO, "--json", str(out)]
    command = typer.Typer()
    command.command()(memory.memory)
    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert "inconclusive: nothing finished" in result.output
    assert set(json.loads(out.read_text())["verdicts"].values()) == {"inconclusive"}
