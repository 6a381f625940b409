"""`vsched calibrate`, and the use of its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from vsched.cli import app, main
from vsched.errors import ConfigError

pytest.importorskip("torch")  # so that the command does not hide it from this process

DEMO = Path(__file__).parents[3] / "workers" / "demo-model"


def run(*words: str) -> tuple[int, str]:
    main.import_commands()
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    return done.exit_code, done.stdout


@pytest.mark.slow
def test_calibrate_writes_a_file_that_check_takes(tmp_path: Path) -> None:
    texts, file = tmp_path / "texts.txt", tmp_path / "calibration.safetensors"
    texts.write_text("What is in the picture?\n\nA green circle.\n")
    Image.new("RGB", (64, 48), "green").save(tmp_path / "green.png")
    status, reported = run(
        *("calibrate", str(DEMO), "--texts", str(texts)),
        *("--images", str(tmp_path), "--output", str(file)),
    )
    assert status == 0
    assert "layers, by 2 lines and 1 images" in reported
    both = [
        *("--set", 'generate.weights="int4"', "--set", f"generate.calibration={file}"),
        *("--set", 'encode.weights="int8"', "--set", f"encode.calibration={file}"),
    ]
    assert run("check", str(DEMO), *both)[0] == 0
    status, reported = run("check", str(DEMO), "--set", f"generate.calibration={file}")
    assert status == 1
    assert "generate.weights is auto" in reported
    status, reported = run(
        "check", str(DEMO), *both, "--set", "generate.calibration=none.safetensors"
    )
    assert status == 1
    assert "generate.calibration: none.safetensors is not there" in reported


@pytest.mark.parametrize(
    ("texts", "images", "message"),
    [
        (None, False, "--texts: .* cannot be read"),
        (" \n", False, "--texts: .* has no text"),
        ("words", True, "--images: no image in "),
    ],
)
def test_calibrate_refuses_input_that_it_cannot_run(
    tmp_path: Path, texts: str | None, images: bool, message: str
) -> None:
    file = tmp_path / "texts.txt"
    if texts is not None:
        file.write_text(texts)
    words = ["calibrate", str(DEMO), "--texts", str(file), "--output", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=message):
        run(*words, *(["--images", str(tmp_path)] if images else []))
