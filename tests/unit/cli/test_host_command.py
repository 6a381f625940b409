"""`vsched host` without required options, and its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vsched.aio.hosts.link import read_key_file
from vsched.cli import app
from vsched.cli.main import import_commands
from vsched.errors import ConfigError


def run(*words: str) -> str:
    """Return the output of the command."""
    import_commands(["host"])
    result = CliRunner().invoke(app, ["host", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_host_makes_a_key_that_engine_and_hosts_can_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts.key"
    assert "has a new key" in run("--make-key", str(path))
    assert read_key_file(str(path), key="cluster.key_file")
    for words, message in (
        ([], "--listen and --key-file are needed"),
        (["--listen", "tcp://127.0.0.2:*"], "--listen and --key-file are needed"),
        (["--listen", "tcp://192.0.2.1:1", "--key-file", str(path)], r"cannot listen on tcp://192"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(*words)
