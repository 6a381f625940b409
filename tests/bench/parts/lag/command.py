"""`python -m tests.bench.parts lag`: event loop latency under the largest legal requests."""

from __future__ import annotations

from typing import Annotated

import typer

from vsched.terminal.options import JsonOption, SetOption, write_json


def lag(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients of the last row.")] = 32,
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the last row.")] = 60.0,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each other row.")] = 3,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    out: JsonOption = None,
) -> None:
    """Send the largest legal requests, one by one and all at once; measure how late the event loop is."""
    import uvloop
    from rich.console import Console
    from rich.table import Table

    from tests.bench.parts.lag.measure import measure_lag

    console = Console()
    rows = uvloop.run(
        measure_lag(
            [*(assignments or ()), f"model.path={path}"],
            clients=clients,
            seconds=seconds,
            only=only,
            requests=requests,
            advanced=lambda row: console.print(
                f"[dim]{row.name}: p99 {row.p99_ms} ms, worst {row.worst_ms} ms[/dim]"
            ),
        )
    )
    table = Table(title="Lateness of the event loop")
    for name in (
        "request",
        "MB",
        "answers",
        "s",
        "p99, ms",
        "worst",
        "beside",
        "MiB",
        "beats",
        "missed",
        "lost",
    ):
        table.add_column(name, justify="left" if name == "request" else "right")
    for row in rows:
        answers = ", ".join(f"{count} x {status}" for status, count in row.statuses.items())
        table.add_row(
            *(row.name, f"{row.body_bytes / 1e6:.1f}" if row.body_bytes else "", answers),
            *(
                f"{row.answer_s:.2f}",
                f"{row.p99_ms:.1f}",
                f"{row.worst_ms:.0f}",
                f"{row.beside_p99_ms:.0f}",
            ),
            *(
                f"{row.peak_bytes / 2**20:.0f}",
                str(row.heartbeats),
                str(row.heartbeats_missed),
                str(row.lost),
            ),
        )
    console.print(table)
    if out is not None:
        write_json(out, rows)
    if any(row.lost or row.heartbeats_missed for row in rows):
        raise typer.Exit(1)
