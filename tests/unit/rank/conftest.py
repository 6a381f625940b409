"""Fixtures for rank processes: their place, and an import path with the fake plug-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.rank.worker_groups import Place, python_path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("PYTHONPATH", python_path())
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    place = Place(run_dir)
    yield place
    place.close()
