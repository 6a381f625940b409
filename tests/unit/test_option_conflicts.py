"""Options that do not go together are reported, not dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from vsched.cli.policy_commands import gallery
from vsched.config import load_config
from vsched.errors import ConfigError
from vsched.terminal.options import check_writable


def test_value_in_place_of_a_table_is_reported_next_to_a_key_of_the_table() -> None:
    environ = {"VSCHED__GENERATE": "3", "VSCHED__GENERATE__SLOTS": "4"}
    with pytest.raises(ConfigError, match="generate .*VSCHED__GENERATE.: a table of keys, not a"):
        load_config(None, environ=environ)
    with pytest.raises(ConfigError, match="arena .*: a table of keys, not a value"):
        load_config(None, sets=["arena=3", "arena.pixel_bytes=1GiB"], environ={})


def test_two_outputs_in_one_file_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_writable({"--html": out, "--json": tmp_path / "other"})
    check_writable({"--html": Path("/dev/null"), "--json": Path("/dev/null")})
    with pytest.raises(ConfigError, match=r"--json .*: --html has the same file\. Remedy: "):
        check_writable({"--html": out, "--json": tmp_path / "." / "out"})


def test_gallery_names_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file: cannot be created: File exists\. Remedy: "):
        gallery(tmp_path / "file")
