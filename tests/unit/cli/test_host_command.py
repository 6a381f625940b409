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


@pytest.mark.parametrize("words", [[], ["--listen", "tcp://127.0.0.2:*"]])
def test_host_says_what_it_needs(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--listen and --key-file are needed"):
        run(*words)


def test_host_names_an_address_that_it_cannot_listen_on(tmp_path: Path) -> None:
    path = tmp_path / "hosts.key"
    run("--make-key", str(path))
    with pytest.raises(ConfigError, match=r"cannot listen on tcp://192\.0\.2\.1:1"):
        run("--listen", "tcp://192.0.2.1:1", "--key-file", str(path))
