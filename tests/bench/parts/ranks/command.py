"""`python -m tests.bench.parts ranks`: latency of a decision to a rank, compared with plain ZeroMQ."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vsched.terminal.options import JsonOption, PlotOption, new_figure, write_json

if TYPE_CHECKING:
    from tests.bench.parts.ranks.measure import RanksRow


def ranks(
    messages: Annotated[int, typer.Option(min=20, help="Messages per round.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the transports take turns.")] = 7,
    out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure microseconds from a decision to its decoding in a rank process, digest check included."""
    import uvloop
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from tests.bench.parts.ranks.measure import PAUSES_S, WAYS, measure_ranks

    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("messages", total=rounds * len(PAUSES_S) * len(WAYS))
        rows = uvloop.run(
            measure_ranks(messages=messages, rounds=rounds, advanced=lambda: progress.advance(task))
        )
    table = Table(title=f"Leader to rank, one way, µs ({rounds} rounds)")
    for name in ("pause ms", "way", "p50", "p99", "p50 of rounds", "p99 of rounds"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in rows:
        table.add_row(
            f"{row.pause_ms:g}",
            row.way,
            f"{row.p50_us:.1f}",
            f"{row.p99_us:.1f}",
            *("{:.1f}-{:.1f}".format(*one) for one in (row.spread_us, row.p99_spread_us)),
        )
    console.print(table)
    if out is not None:
        write_json(out, {"load": os.getloadavg()[0], "rows": rows})
    if plot is not None:
        _plot(rows, plot)
        console.print(f"Plot: {plot}")


def _plot(rows: list[RanksRow], path: Path) -> None:
    figure = new_figure(9, 3.5)
    pauses = sorted({row.pause_ms for row in rows})
    for axis, pause_ms in zip(figure.subplots(1, len(pauses)), pauses, strict=True):
        shown = [row for row in rows if row.pause_ms == pause_ms]
        names = [row.way for row in shown]
        axis.barh(names, [row.p99_us for row in shown], color="lightgrey", label="p99")
        axis.barh(names, [row.p50_us for row in shown], height=0.5, label="p50")
        axis.set_title("back to back" if pause_ms == 0 else f"after {pause_ms:g} ms idle")
        axis.set_xlabel("µs, one way")
        axis.invert_yaxis()
        axis.legend(loc="lower right")
    figure.savefig(path, dpi=110)
