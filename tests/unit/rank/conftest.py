"""Fixtures for rank processes: their place, and an import path with the fake plug-in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.rank.worker_groups import Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    place = Place(run_dir)
    yield place
    place.close()
