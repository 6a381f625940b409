"""`python -m tests.bench.parts front`: requests per second with ranks that compute nothing, and CPU time by process."""

from __future__ import annotations

from typing import Annotated

import typer

from vsched.terminal.options import JsonOption, SetOption, write_json


def front(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 400,
    short: Annotated[int, typer.Option(min=1, help="Tokens of a short answer.")] = 8,
    long: Annotated[int, typer.Option(min=1, help="Tokens of a long one.")] = 128,
    processes: Annotated[
        str, typer.Option(help="Numbers of server.processes to compare, separated by commas.")
    ] = "1",
    paced: Annotated[
        bool,
        typer.Option(help="Make each step take 10 ms, so that it contains all running requests."),
    ] = False,
    out: JsonOption = None,
) -> None:
    """Serve requests without the model: short answers, long ones, images; report the cost of each."""
    import uvloop
    from rich.console import Console
    from rich.table import Table

    from tests.bench.parts.front.measure import FrontLoad, FrontRow, measure_front
    from tests.bench.parts.front.stub_plugin import PACED
    from vsched.bench.load.shapes import Case

    console = Console()
    loads = [
        FrontLoad(case=case, output_tokens=tokens, clients=min(clients, count), requests=count)
        for case, tokens, count in (
            (Case.TEXT, short, requests),
            (Case.TEXT, long, requests),
            (Case.IMAGE, short, max(requests // 4, 1)),
        )
    ]
    settings = [*_ROOM, *(assignments or ()), f"model.path={path}"]
    if paced:
        settings.append(f"generate.plugin={PACED}")

    def advanced(row: FrontRow) -> None:
        console.print(f"[dim]{row.processes} processes, {row.case}: done[/dim]")

    rows: list[FrontRow] = []
    for count in processes.split(","):
        one = [*settings, f"server.processes={count.strip()}"]
        rows += uvloop.run(measure_front(one, loads, advanced))
    table = Table(title="A server whose ranks compute nothing")
    for name in (
        *("processes", "case", "tokens", "clients", "requests/s", "tokens/s"),
        *("HTTP, ms a request", "engine", "ranks", "clients' cores"),
    ):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        table.add_row(
            *(str(row.processes), row.case, str(row.output_tokens), str(row.clients)),
            *(f"{row.requests_s:.1f}", f"{row.output_tokens_s:.0f}"),
            *(f"{row.http_ms:.2f}", f"{row.engine_ms:.2f}"),
            *(f"{row.ranks_ms:.2f}", f"{row.client_cpu:.2f}"),
        )
    console.print(table)
    if out is not None:
        write_json(out, rows)


_ROOM = (
    "generate.slots=64",
    "generate.max_waiting=4096",
    'generate.memory={use="pinned", tokens=200000}',
)
"""Enough slots that no request waits long for one; further settings may change it."""
