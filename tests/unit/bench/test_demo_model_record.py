"""The demo checkpoint: its record meets the targets, and its page agrees with the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo_training.interval import Share

ROOT = Path(__file__).parents[3]
AIMS = {"number": 95, "colour": 98, "shape": 98, "count": 90}
SIZE_MAX = 12 * 2**20


def record() -> dict[str, dict[str, Share]]:
    reported = json.loads((ROOT / "workers" / "demo-model" / "training.json").read_text("utf-8"))
    return {
        fonts: {task: Share(share["right"], share["questions"]) for task, share in tasks.items()}
        for fonts, tasks in reported["held_out_accuracy"].items()
    }


@pytest.mark.parametrize("task", AIMS)
def test_demo_model_meets_its_aims(task: str) -> None:
    share = record()["built-in font"][task]
    assert share.total >= 500
    assert 100 * share.right / share.total >= AIMS[task]


def test_demo_model_page_has_the_figures_of_its_record() -> None:
    page = (ROOT / "docs" / "demo-model.md").read_text("utf-8")
    rows = {
        cells[0]: cells[1:]
        for cells in (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in page.splitlines()
            if line.startswith("|")
        )
    }
    known = record()
    for task, share in known["built-in font"].items():
        assert rows[task][0] == share.text(), task
    for task in ("number", "second"):
        assert rows[task][1] == known["other fonts"][task].text(), task


def test_demo_model_fits_into_the_repository() -> None:
    files = (ROOT / "workers" / "demo-model").iterdir()
    assert sum(file.stat().st_size for file in files) <= SIZE_MAX
