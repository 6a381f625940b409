"""`python -m demo_training OUT`: train the small checkpoint from scratch, or resume a stopped run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from demo_training.drawing import BUILT_IN_FONT, HELD_OUT_FONTS
from demo_training.report import FINAL_COUNT, accuracy_table, smoothed, write_report
from demo_training.samples import TASKS, held_out
from demo_training.train import Plan, Trainer, held_out_batches
from vsched.errors import VschedError

MEASURED_EVERY = 250
SAVED_EVERY_S = 150.0
QUICK_COUNT = 50
QUICK_SEED = 7
"""Seed of the evaluation during training, other than for the final table."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo_training", description=__doc__)
    parser.add_argument(
        "out", type=Path, help="folder of the checkpoint; an interrupted run continues"
    )
    parser.add_argument("--steps", type=int, default=Plan.steps, help="of the first round")
    parser.add_argument("--again", type=int, default=Plan.again, help="steps of the second round")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--threads", type=int, default=Plan.threads)
    chosen = parser.parse_args(arguments)
    console = Console()
    plan = Plan(seed=chosen.seed, steps=chosen.steps, again=chosen.again, threads=chosen.threads)
    try:
        trainer = Trainer(chosen.out, plan)
    except VschedError as error:
        console.print(f"[red]{error}[/red]")
        return 2
    _run(trainer, console)
    _finish(trainer, console)
    return 0


def _run(trainer: Trainer, console: Console) -> None:
    progress, steps = trainer.progress, trainer.plan.total
    watched = {
        task: held_out_batches(held_out(task, QUICK_COUNT, seed=QUICK_SEED), trainer.front)
        for task in TASKS
    }
    begin = saved = time.monotonic()
    before = progress.seconds
    columns = (
        TextColumn("training"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("", total=steps, completed=progress.step)
        accuracy = ""
        for batch in trainer.batches.ahead(range(progress.step, steps)):
            trainer.step(batch)
            progress.seconds = before + time.monotonic() - begin
            if progress.step % MEASURED_EVERY == 0:
                shares = {n: right / all_ for n, (right, all_) in trainer.measure(watched).items()}
                progress.accuracies.append((progress.step, shares))
                accuracy = " ".join(f"{name} {share:.2f}" for name, share in shares.items())
                loss = smoothed(progress.losses, MEASURED_EVERY)[-1][1]
                minutes = progress.seconds / 60
                console.print(
                    f"step {progress.step} ({minutes:.0f} min): loss {loss:.3f} {accuracy}"
                )
            if progress.step % 10 == 0:
                loss = smoothed(progress.losses[-50:], 50)[-1][1]
                bars.update(bar, completed=progress.step, description=f"loss {loss:.3f} {accuracy}")
            if time.monotonic() - saved > SAVED_EVERY_S:
                trainer.save()
                saved = time.monotonic()
    trainer.save()


def _finish(trainer: Trainer, console: Console) -> None:
    """Run the final evaluation; only numbers depend on the font."""
    sets = {
        "built-in font": ((BUILT_IN_FONT,), TASKS),
        "other fonts": (tuple(HELD_OUT_FONTS)[1:], ("number", "second")),
    }
    measured = {
        name: trainer.measure(
            {
                task: held_out_batches(
                    held_out(task, FINAL_COUNT, packages=packages), trainer.front
                )
                for task in tasks
            }
        )
        for name, (packages, tasks) in sets.items()
    }
    write_report(trainer.directory, trainer.plan, trainer.progress, measured)
    console.print(accuracy_table(measured))


if __name__ == "__main__":
    sys.exit(main())
