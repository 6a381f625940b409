"""The first command of the README, as a newcomer runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_demo_shows_answer_timeline_and_memory(tmp_path: Path) -> None:
    program = "from vsched.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "demo", "--max-tokens", "5"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".demo" / "picture.png").exists()
    for wanted in (
        "5.3 M random parameters",
        "Serving at http://127.0.0.1:",
        "What is in this picture?",
        "assistant",
        "1 image encoded, 5 tokens",
        "prefill",
        "generate rank 0",
        "Stopped",
    ):
        assert wanted in done.stdout
    assert "Traceback" not in done.stderr
