"""`python -m tests.bench.parts recovery`: cost of a killed generate rank."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vsched.terminal.options import JsonOption, PlotOption, SetOption, new_figure, write_json
from vsched.worker.spec import usable_cores

if TYPE_CHECKING:
    from rich.console import Console

    from tests.bench.parts.recovery.measure import Recovery, RecoveryCase


def recovery(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Losses of each case; the cases take turns.")
    ] = 3,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Case: dtype of the model.", show_default="float32, bfloat16"),
    ] = None,
    busy: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Case: other processes that occupy a core each.",
            show_default="0, twice the cores",
        ),
    ] = None,
    new_processes: Annotated[
        bool, typer.Option(help="Also measure ranks started as new processes instead of forks.")
    ] = False,
    out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Kill a generate rank under load; measure the time to the first new token of every stream, by phase."""
    from rich.console import Console
    from rich.progress import Progress

    from tests.bench.parts.recovery.measure import RecoveryCase, measure_recovery

    console = Console()
    cores = usable_cores()
    cases = [
        RecoveryCase(dtype=one, busy=loops, forked=forked)
        for one, loops, forked in itertools.product(
            dtype or ["float32", "bfloat16"],
            busy or [0, 2 * cores],
            [True, False] if new_processes else [True],
        )
    ]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("losses", total=rounds * len(cases))
        found = asyncio.run(
            measure_recovery(
                [*(assignments or ()), f"model.path={path}"],
                cases=cases,
                rounds=rounds,
                advanced=lambda: progress.advance(task),
            )
        )
    _show(found, cases, rounds, console)
    if out is not None:
        write_json(out, found)
    if plot is not None:
        _plot(found, cases, plot)
        console.print(f"Plot: {plot}")
    if not all(one.kept for one in found):
        console.print("A stream did not get the promised tokens.")
        raise typer.Exit(1)


def _name(case: RecoveryCase) -> str:
    beside = f"{case.busy} busy loops" if case.busy else "quiet"
    return f"{case.dtype}, {beside}, {'forked' if case.forked else 'new process'}"


def _show(found: list[Recovery], cases: list[RecoveryCase], rounds: int, console: Console) -> None:
    from rich.table import Table

    from tests.bench.parts.recovery.measure import STATIONS, STREAMS

    table = Table(
        title=f"Seconds after a generate rank was killed, {STREAMS} streams, {rounds} losses each"
    )
    for name in ("case, until", "lowest", "median", "highest", "same tokens"):
        table.add_column(name, justify="left" if name == "case, until" else "right")
    for case in cases:
        of_case = [one for one in found if one.case == case]
        same = sum(one.same_tokens for one in of_case)
        table.add_row(_name(case), "", "", "", f"{same} of {len(of_case)}")
        ends = zip(*(one.ends_s for one in of_case), strict=True)
        for station, values in zip(STATIONS, ends, strict=True):
            figures = (min(values), statistics.median(values), max(values))
            table.add_row(f"  {station}", *(f"{value:.2f}" for value in figures))
        table.add_section()
    console.print(table)


def _plot(found: list[Recovery], cases: list[RecoveryCase], path: Path) -> None:
    from tests.bench.parts.recovery.measure import STATIONS

    figure = new_figure(9, 1.2 + 0.4 * len(cases))
    axis = figure.subplots()
    for index, case in enumerate(cases):
        ends = zip(*(one.ends_s for one in found if one.case == case), strict=True)
        left = 0.0
        for number, (station, values) in enumerate(zip(STATIONS, ends, strict=True)):
            end = statistics.median(values)
            label = None if index else station
            axis.barh(index, end - left, left=left, color=f"C{number}", label=label)
            left = end
    axis.set_xlabel("seconds after the kill, medians")
    axis.set_yticks(range(len(cases)), [_name(case) for case in cases])
    axis.legend(ncols=len(STATIONS), fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(path, dpi=110)
