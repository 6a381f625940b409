"""`vsched profile`: its output for an engine that started, and for one whose KV cache fits in no size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.memory.views import attempted, memory_view
from vsched.cli import app, main, profile_command
from vsched.config import Config, RecordConfig
from vsched.errors import DeviceOutOfMemory
from vsched.memory import Ledger, group_ledger

DEMO = "workers/demo-model"


def test_profile_reports_the_threads_of_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads in use once everything is loaded, which are fewer on a busy machine."""
    ledger = group_ledger(memory_view(), [attempted("build", 1_000)])
    threads = {"generate": {"0": {"active": 1, "total": 2}}}

    async def size(settings: Config, _: object) -> tuple[Ledger, dict[str, Any], None]:
        assert settings.record == RecordConfig(), "the record of a server is not overwritten"
        return ledger, {"generate": {"blocks_total": 4}, "threads": threads, "memory": {}}, None

    monkeypatch.setattr(profile_command, "_size", size)
    main.import_commands()
    out = tmp_path / "ledger.json"
    words = ["profile", DEMO, "--json", str(out), "--set", "record.path=run.vlog"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "generate rank 0 computes with 1 of 2 threads\n" in done.output
    assert "64 tokens of KV cache, found" in done.output
    assert json.loads(out.read_text())["threads"] == threads


def failed_ledger() -> Ledger:
    """A probe that fits, and a build that does not."""
    attempts = [attempted("probe", 1_000), attempted("build", 60_000, "out_of_memory")]
    return group_ledger(memory_view(), attempts)


@pytest.mark.parametrize("ledger", [failed_ledger(), None])
def test_profile_prints_and_writes_what_it_has_before_it_raises(
    ledger: Ledger | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = DeviceOutOfMemory("nothing fits. Remedy: raise generate.memory_limit.")

    async def size(*_: object) -> tuple[Ledger | None, dict[str, Any], DeviceOutOfMemory]:
        return ledger, {}, error

    monkeypatch.setattr(profile_command, "_size", size)
    main.import_commands()
    out = tmp_path / "ledger.json"
    done = CliRunner().invoke(app, ["profile", DEMO, "--json", str(out)])
    assert done.exception is error
    assert ("generate: build" in done.output) == (ledger is not None)
    assert "tokens of KV cache, found" not in done.output
    written = json.loads(out.read_text())
    assert (written["kv_tokens"], written["error"]) == (0, str(error))
    actions = [(one["action"], one["outcome"]) for one in written.get("phases", ())]
    reported = [("probe", "fits"), ("build", "out_of_memory")] if ledger is not None else []
    assert actions == reported
