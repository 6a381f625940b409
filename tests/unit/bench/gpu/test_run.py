"""The whole command for ten minutes with a GPU, on a CPU with the smallest models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.gpu import __main__ as command
from tests.bench.gpu.page import page

pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.thorough
def test_dry_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps without another test: servers under load and killed ranks are tested elsewhere."""
    cpu = ["--device=cpu", "--models=nano", "--served=nano25", "--seconds=280"]
    only = "--only=models-nano,checkpoint,conversations,weights"
    monkeypatch.setattr(sys, "argv", ["gpu", f"--out={tmp_path}", *cpu, only])
    assert command.main() == 0, "\n".join(
        f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(tmp_path.glob("*.log"))
    )
    made = page(tmp_path)
    for expected in (
        "| decode 3 x 32 |",
        "| decode 1 x 32 int4 |",
        "| tiny turn 8 |",
        "| checkpoint | done |",
    ):
        assert expected in made
