"""`python -m tests.bench.parts accuracy`, small: two settings, real engines, real preemptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.parts.__main__ import app
from tests.e2e.command_line import run_command


@pytest.mark.slow
@pytest.mark.thorough
def test_accuracy_bench_finds_no_change_if_requests_preempt_each_other(
    tmp_path: Path, checkpoints: Callable[[str], Path]
) -> None:
    """Answers equal those of an undisturbed engine, and the report has the preemptions."""
    out, plot = tmp_path / "accuracy.json", tmp_path / "accuracy.png"
    words = ["--count", "3", "--only", "preempted", "--budgets", ""]
    words += ["--set", "encode.threads=1", "--set", "generate.threads=1"]
    words += ["--json", str(out), "--plot", str(plot)]
    printed = run_command(app, "accuracy", str(checkpoints("nano25")), *words)
    assert "No answer changed under 2 settings without a clamp." in printed
    report = json.loads(out.read_bytes())
    undisturbed, preempted = report["outcomes"]
    assert (undisturbed["name"], preempted["name"]) == ("default", "preempted")
    assert preempted["preemptions"] > undisturbed["preemptions"] == 0
    assert undisturbed["tokens_cached"] > 0
    assert [task["task"] for task in undisturbed["tasks"]][-1] == "conversation"
    assert sum(task["total"] for task in preempted["tasks"]) == report["questions"] == 5 * 3 + 9
    assert undisturbed["changed"] == preempted["changed"] == []
    assert plot.stat().st_size > 1000
