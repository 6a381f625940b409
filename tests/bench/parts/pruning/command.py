"""`python -m tests.bench.parts pruning`: speed and accuracy of pruned videos."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vsched.terminal.options import JsonOption, SetOption, write_json

if TYPE_CHECKING:
    from rich.console import Console


def pruning(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    frames: Annotated[int, typer.Option(min=4, help="Frames of a video for speed.")] = 64,
    repeats: Annotated[int, typer.Option(min=0, help="Videos per share; 0 for no speed.")] = 3,
    questions: Annotated[
        int, typer.Option(min=0, help="Questions per task, for the demo model; 0 for no accuracy.")
    ] = 0,
    videos: Annotated[
        str, typer.Option(help="Kinds of videos for questions, separated by commas.")
    ] = "rests,appears,moves",
    out: JsonOption = None,
) -> None:
    """Compare shares of pruned tokens: prompt, TTFT and TPOT, and right answers about drawn videos."""
    from rich.console import Console

    console = Console()
    report = asyncio.run(
        _measure(
            [*(assignments or ()), f"model.path={path}"],
            frames,
            repeats,
            questions,
            videos.split(","),
            console,
        )
    )
    _show(report, questions, console)
    if out is not None:
        write_json(out, report)


async def _measure(
    settings: list[str],
    frames: int,
    repeats: int,
    questions: int,
    kinds: list[str],
    console: Console,
) -> dict[str, Any]:
    from rich.progress import Progress

    from tests.bench.parts.pruning import measure as bench

    shares = [bench.Setting(), bench.Setting(0.5), bench.Setting(0.75)]
    whole = f"{bench.WholeGroups.__module__}:{bench.WholeGroups.__qualname__}"
    others = [bench.Setting(0.5, whole), bench.Setting(0.75, whole)]
    report: dict[str, Any] = {}
    with Progress(console=console, transient=True) as progress:
        if repeats:
            task = progress.add_task("speed", total=2 * len(shares) * repeats)
            report["speed"] = await bench.measure_speed(
                settings,
                shares,
                frames=frames,
                repeats=repeats,
                advanced=lambda: progress.advance(task),
            )
        if questions:
            compared = [*shares, *others]
            total = len(kinds) * len(bench.TASKS) * questions * len(compared)
            count = progress.add_task("questions", total=total)
            report["right"] = await bench.measure_accuracy(
                settings,
                compared,
                kinds,
                count=questions,
                advanced=lambda: progress.advance(count),
            )
    return report


def _show(report: dict[str, Any], questions: int, console: Console) -> None:
    from rich.table import Table

    speed = Table("video", "pruned", "prompt tokens", "TTFT, ms", "TPOT, ms")
    for kind, shares in report.get("speed", {}).items():
        for name, answers in shares.items():
            speed.add_row(
                kind,
                name,
                str(answers[0].prompt_tokens),
                f"{median(one.ttft_ms for one in answers):,.0f}",
                f"{median(one.token_ms for one in answers):.1f}",
            )
    if "speed" in report:
        console.print(speed)
    for kind, shares in report.get("right", {}).items():
        tasks = list(next(iter(shares.values())))
        table = Table(f"right answers in %, {kind}", *tasks)
        for name, counts in shares.items():
            table.add_row(name, *(f"{100 * counts[task] / questions:.0f}" for task in tasks))
        console.print(table)
