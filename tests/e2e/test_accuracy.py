"""`vsched bench accuracy`, small: two settings, real engines, real preemptions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S


@pytest.mark.slow
def test_accuracy_bench_finds_no_change_where_requests_preempt_each_other(
    tmp_path: Path, checkpoints: Callable[[str], Path]
) -> None:
    """Answers are those of an undisturbed engine, and the report says what happened."""
    out, plot = tmp_path / "accuracy.json", tmp_path / "accuracy.png"
    program = "from vsched.cli.main import main; main()"
    words = ["--count", "3", "--only", "preempted", "--budgets", ""]
    words += ["--set", "encode.threads=1", "--set", "generate.threads=1"]
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, "bench", "accuracy", str(checkpoints("nano25"))),
            *(*words, "--json", str(out), "--plot", str(plot)),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No answer changed under 2 settings without a clamp." in done.stdout
    report = json.loads(out.read_bytes())
    undisturbed, preempted = report["outcomes"]
    assert (undisturbed["name"], preempted["name"]) == ("default", "preempted")
    assert preempted["preemptions"] > undisturbed["preemptions"] == 0
    assert undisturbed["tokens_cached"] > 0
    assert [task["task"] for task in undisturbed["tasks"]][-1] == "conversation"
    assert sum(task["total"] for task in preempted["tasks"]) == report["questions"] == 5 * 3 + 9
    assert undisturbed["changed"] == preempted["changed"] == []
    assert plot.stat().st_size > 1000
