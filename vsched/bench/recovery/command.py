"""`vsched bench recovery`: what a killed generate rank costs."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vsched.terminal.options import JsonOption, PlotOption, SetOption, new_figure, write_json

if TYPE_CHECKING:
    from vsched.bench.recovery.measure import Recovery


def recovery(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Losses, each in a server of its own.")] = 3,
    out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Kill a generate rank under load; measure the time to the first new token of every stream, in parts."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from vsched.bench.recovery.measure import PARTS, STREAMS, measure_recovery

    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("losses", total=rounds)
        found = asyncio.run(
            measure_recovery(
                [*(assignments or ()), f"model.path={path}"],
                rounds=rounds,
                advanced=lambda: progress.advance(task),
            )
        )
    table = Table(
        title=f"A generate rank is killed while {STREAMS} streams run, s ({rounds} times)"
    )
    for name in ("part", "median", "lowest", "highest"):
        table.add_column(name, justify="left" if name == "part" else "right")
    parts = zip(*(one.parts_s for one in found), strict=True)
    rows = [*zip(PARTS, parts, strict=True), ("all", [one.total_s for one in found])]
    for name, values in rows:
        shown = (statistics.median(values), min(values), max(values))
        table.add_row(name, *(f"{value:.2f}" for value in shown))
    console.print(table)
    same = sum(one.same_tokens for one in found)
    console.print(f"Tokens as undisturbed, none missing and none twice: {same} of {rounds} times.")
    if out is not None:
        write_json(out, found)
    if plot is not None:
        _plot(found, plot)
        console.print(f"Plot: {plot}")
    if same < rounds:
        raise typer.Exit(1)


def _plot(found: list[Recovery], path: Path) -> None:
    from vsched.bench.recovery.measure import PARTS

    figure = new_figure(9, 1.2 + 0.4 * len(found))
    axis = figure.subplots()
    for index, one in enumerate(found):
        left = 0.0
        for number, (part, width) in enumerate(zip(PARTS, one.parts_s, strict=True)):
            axis.barh(index, width, left=left, color=f"C{number}", label=None if index else part)
            left += width
    axis.set_xlabel("seconds after the kill")
    axis.set_yticks(range(len(found)), [f"loss {index + 1}" for index in range(len(found))])
    axis.legend(ncols=len(PARTS), fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(path, dpi=110)
