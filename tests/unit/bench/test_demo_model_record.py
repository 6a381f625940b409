"""The demo checkpoint: its record meets the targets, its page agrees with the record, and intervals are Wilson's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo_training.interval import Share, wilson_interval
from tests.each_case import each_case

ROOT = Path(__file__).parents[3]
AIMS = {"number": 95, "colour": 98, "shape": 98, "count": 90}
SIZE_MAX = 12 * 2**20


def record() -> dict[str, dict[str, Share]]:
    reported = json.loads((ROOT / "workers" / "demo-model" / "training.json").read_text("utf-8"))
    return {
        fonts: {task: Share(share["right"], share["questions"]) for task, share in tasks.items()}
        for fonts, tasks in reported["held_out_accuracy"].items()
    }


def test_demo_model_meets_its_aims() -> None:
    """It also fits into the repository."""
    for task, aim in AIMS.items():
        share = record()["built-in font"][task]
        assert share.total >= 500
        assert 100 * share.right / share.total >= aim, task
    files = (ROOT / "workers" / "demo-model").iterdir()
    assert sum(file.stat().st_size for file in files) <= SIZE_MAX


def test_demo_model_page_has_the_figures_of_its_record() -> None:
    page = (ROOT / "docs" / "demo-model.md").read_text("utf-8")
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    rows = {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}
    known = record()
    for task, share in known["built-in font"].items():
        assert rows[task][0] == share.text(), task
    for task in ("number", "second"):
        assert rows[task][1] == known["other fonts"][task].text(), task


@each_case(
    ("right", "total", "low", "high"),
    [
        # Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_equals_published_values(
    right: int, total: int, low: float, high: float
) -> None:
    assert wilson_interval(right, total) == pytest.approx((low, high), abs=5e-5)


def test_share_is_worded_in_per_cent() -> None:
    assert Share(97, 100).text() == "97.0 (91.5-99.0)"
    assert Share(0, 0).value == 0.0
    for right in (3, -1):
        with pytest.raises(ValueError, match="not a share"):
            wilson_interval(right, 2)
