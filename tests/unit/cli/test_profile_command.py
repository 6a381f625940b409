"""`vsched profile`: its output for an engine that started, and for one whose KV cache fits in no size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.commands import run_command
from tests.unit.memory.views import attempted, memory_view
from vsched.cli import app, main, profile_command
from vsched.config import Config, RecordConfig
from vsched.errors import ConfigError, DeviceOutOfMemory
from vsched.memory import group_ledger

DEMO = "workers/demo-model"


def profile(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *sized: Any
) -> tuple[Result, dict[str, Any]]:
    """Return the outcome of the command, and what it writes, when sizing ends so: ledger, statistics, error."""

    async def size(settings: Config, _: object) -> tuple[Any, ...]:
        assert settings.record == RecordConfig(), "the record of a server is not overwritten"
        return sized

    monkeypatch.setattr(profile_command, "_size", size)
    main.import_commands()
    out = folder / "ledger.json"
    words = ["profile", DEMO, "--json", str(out), "--set", "record.path=run.vlog"]
    return CliRunner().invoke(app, words), json.loads(out.read_text())


def test_profile_reports_threads_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads in use once everything is loaded, which are fewer on a busy machine."""
    ledger = group_ledger(memory_view(), [attempted("build", 1_000)])
    threads = {"generate": {"0": {"active": 1, "total": 2}}}
    statistics = {"generate": {"blocks_total": 4}, "threads": threads, "memory": {}}
    done, written = profile(monkeypatch, tmp_path, ledger, statistics, None)
    assert "generate rank 0 computes with 1 of 2 threads\n" in done.output
    assert "64 tokens of KV cache, found" in done.output
    assert written["threads"] == threads


TRIED = [("probe", "fits"), ("build", "out_of_memory")]


@pytest.mark.parametrize("tried", [TRIED, []])
def test_profile_prints_and_writes_its_results_before_it_raises(
    tried: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = DeviceOutOfMemory("nothing fits. Remedy: raise generate.memory_limit.")
    attempts = [attempted(action, 1_000, outcome) for action, outcome in tried]
    ledger = group_ledger(memory_view(), attempts) if tried else None
    done, written = profile(monkeypatch, tmp_path, ledger, {}, error)
    assert done.exception is error
    assert ("generate: build" in done.output) == bool(tried)
    assert "tokens of KV cache, found" not in done.output
    assert (written["kv_tokens"], written["error"]) == (0, str(error))
    assert [(one["action"], one["outcome"]) for one in written.get("phases", ())] == tried


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("profile", DEMO, "--seconds", "9"), "--seconds: needs --calibrate"),
        (("bench", "fidelity", DEMO, "--loads", "0.5,nan"), "--loads 0.5,nan: not a list of"),
        (("bench", "fidelity", DEMO, "--loads", "inf"), "--loads inf: not a list of positive"),
    ],
)
def test_options_are_refused_before_anything_is_measured(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_command(*words)
