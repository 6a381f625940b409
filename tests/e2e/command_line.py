"""The `vsched` command in the process of the tests, so that its ranks start as theirs do."""

from __future__ import annotations

from typer.testing import CliRunner

from vsched.cli import app, main


def run_vsched(*words: str, columns: int = 120) -> str:
    """Run `vsched`, which must succeed; return its output."""
    main.import_commands()
    shown = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    done = CliRunner().invoke(app, words, env=shown, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output
