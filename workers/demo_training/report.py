"""Reports of a run: `training.json`, a plot of the training curve, the table of accuracies."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.table import Table

from demo_training.drawing import BUILT_IN_FONT, HELD_OUT_FONTS, TRAINING_FONTS
from demo_training.interval import Share, wilson_interval
from demo_training.train import Plan, Progress

FINAL_COUNT = 500
CURVE_POINTS = 200
VERSIONS = (
    *("torch", "transformers", "tokenizers", "pillow", "numpy"),
    *(name for name in (*TRAINING_FONTS, *HELD_OUT_FONTS) if name != BUILT_IN_FONT),
)
"""Packages that the weights depend on, if installed."""

Measured = Mapping[str, Mapping[str, tuple[int, int]]]
"""Right answers and questions, by set of fonts and by task."""


def smoothed(
    losses: Sequence[tuple[int, float, float]], window: int
) -> list[tuple[int, float, float]]:
    """Return the means of consecutive windows, each at its last step; the last window may be short."""
    parts = [losses[at : at + window] for at in range(0, len(losses), window)]
    return [
        (part[-1][0], sum(row[1] for row in part) / len(part), sum(r[2] for r in part) / len(part))
        for part in parts
    ]


def accuracy_table(measured: Measured) -> Table:
    """Return the accuracies with Wilson's 95 % interval."""
    table = Table(title="Held-out accuracy, % (95 % interval)")
    table.add_column("task")
    for name in measured:
        table.add_column(name, justify="right")
    for task in next(iter(measured.values())):
        table.add_row(
            task,
            *(
                Share(*by_task[task]).text() if task in by_task else ""
                for by_task in measured.values()
            ),
        )
    return table


def write_report(directory: Path, plan: Plan, progress: Progress, measured: Measured) -> None:
    """Write `training.json` and, if matplotlib is installed, `training-curve.png`."""
    window = max(1, len(progress.losses) // CURVE_POINTS)
    curve = smoothed(progress.losses, window)
    accuracy = {
        name: {
            task: {"right": right, "questions": total, "interval": _rounded(right, total)}
            for task, (right, total) in by_task.items()
        }
        for name, by_task in measured.items()
    }
    content = {
        "plan": asdict(plan),
        "steps_done": progress.step,
        "minutes": round(progress.seconds / 60, 1),
        "versions": {
            "python": platform.python_version(),
            **_versions(),
        },
        "held_out_accuracy": accuracy,
        "accuracy_along_the_way": [
            {"step": step, **{task: round(share, 3) for task, share in shares.items()}}
            for step, shares in progress.accuracies
        ],
        "curve": {
            "step": [row[0] for row in curve],
            "loss": [round(row[1], 4) for row in curve],
            "marks_loss": [round(row[2], 4) for row in curve],
        },
    }
    text = json.dumps(content, indent=1)
    (directory / "training.json").write_text(text + "\n", encoding="utf-8")
    _plot(directory / "training-curve.png", curve, progress)


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _rounded(right: int, total: int) -> list[float]:
    return [round(bound, 4) for bound in wilson_interval(right, total)]


def _plot(path: Path, curve: Sequence[tuple[int, float, float]], progress: Progress) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8, 4), layout="constrained")
    left = figure.add_subplot()
    steps = [row[0] for row in curve]
    left.plot(steps, [row[1] for row in curve], color="0.3", label="loss of the answers")
    left.set_yscale("log")
    left.set_xlabel("step")
    left.set_ylabel("loss")
    right = left.twinx()
    for task in progress.accuracies[0][1] if progress.accuracies else ():
        points = [(step, 100 * shares[task]) for step, shares in progress.accuracies]
        right.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=task)
    right.set_ylim(0, 101)
    right.set_ylabel("held-out accuracy, %")
    figure.legend(loc="outside upper center", ncols=6, fontsize="small")
    figure.savefig(path, dpi=110)
