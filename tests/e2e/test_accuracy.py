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
    out = tmp_path / "accuracy.json"
    words = ["--count", "3", "--only", "preempted"]
    words += ["--set", "encode.threads=1", "--set", "generate.threads=1"]
    words += ["--json", str(out)]
    run_command(app, "accuracy", str(checkpoints("nano25")), *words)
    report = json.loads(out.read_bytes())
    undisturbed, preempted = report["results"]
    assert (undisturbed["name"], preempted["name"]) == ("default", "preempted")
    assert preempted["preemptions"] > undisturbed["preemptions"] == 0
    assert undisturbed["tokens_cached"] > 0
    assert list(undisturbed["tasks"])[-1] == "conversation"
    asked = sum(total for _, total in preempted["tasks"].values())
    assert asked == report["questions"] == 5 * 3 + 9
    assert undisturbed["changed"] == preempted["changed"] == []
