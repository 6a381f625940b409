"""Options of all commands that name a file to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vsched.cli import app
from vsched.cli.main import import_commands


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "fidelity", "nowhere", "--json"],
        ["bench", "serve", "--json"],
        ["calibrate-vllm", "nowhere", "--output"],
        ["check", "nowhere", "--json"],
        ["policies", "try", "token-budget", "--html"],
        ["profile", "nowhere", "--json"],
        ["replay", "nowhere", "--json"],
        ["tune", "nowhere", "--json"],
        ["tune", "nowhere", "--write"],
    ],
    ids=" ".join,
)
def test_output_that_cannot_be_written_is_refused_before_the_work(
    words: list[str], tmp_path: Path
) -> None:
    import_commands()
    result = CliRunner().invoke(app, [*words, str(tmp_path / "none" / "out")])
    assert str(result.exception).startswith(f"{words[-1]} {tmp_path}/none/out: cannot be written")
