"""Commands of `vsched` in this process."""

from collections.abc import Mapping

from typer.testing import CliRunner

from vsched.cli import app
from vsched.cli.main import import_commands

PLAIN = {"COLUMNS": "120", "NO_COLOR": "1"}
"""Variables with which tables are wide, and have no colours."""


def run_command(*words: object, status: int = 0, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output; errors are raised, for which `vsched` prints one message."""
    texts = [*map(str, words)]
    import_commands(texts[:1])
    done = CliRunner().invoke(app, texts, env=env, catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.output
