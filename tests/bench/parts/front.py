"""`python -m tests.bench.parts front`: rate and CPU time per request of a server whose ranks compute nothing.

The rest is HTTP, templates, tokenization, images, the scheduler and token output. Clients run in
their own process. With few or busy cores, the CPU time is more reliable than the rate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench.parts.stub_plugin import NAME
from vsched.api.http_server import favour_event_loop, forgo_models
from vsched.api.server import RunningServer, running_server
from vsched.bench.load.client_processes import LoadOrder, ready_clients, run_clients
from vsched.bench.load.shapes import Case
from vsched.bench.machine import process_s
from vsched.config import load_config
from vsched.terminal.options import JsonOption, SetOption, write_json

STUBBED = (
    f"encode.plugin={NAME}",
    f"generate.plugin={NAME}",
    "placement=separate",
    "encode.threads=1",
    "generate.threads=1",
    "server.port=0",
)
SHORT_TOKENS, LONG_TOKENS = 8, 128
"""Tokens of a short answer and of a long one."""
_ROOM = (
    "generate.slots=64",
    "generate.max_waiting=4096",
    'generate.memory={use="pinned", tokens=200000}',
)
"""Enough slots that no request waits long for one; further settings may change it."""


Row = dict[str, Any]
"""Result of one load, by the headings of `HEADINGS`."""
HEADINGS = {
    "processes": "processes",
    "case": "case",
    "output_tokens": "tokens",
    "clients": "clients",
    "requests_s": "requests/s",
    "output_tokens_s": "tokens/s",
    "http_ms": "HTTP, ms a request",
    "engine_ms": "engine",
    "ranks_ms": "ranks",
    "client_cpu": "clients' cores",
}
"""Milliseconds are CPU time per request of all HTTP processes, of the engine's process, and of all ranks.

With one process, the engine's also serves HTTP. Near 1 core, the clients limited the result.
"""


async def measure_front(settings: Sequence[str], loads: Sequence[LoadOrder]) -> list[Row]:
    """Serve the loads one after another; return a row for each.

    Raises:
        BenchError: When a request failed.
    """
    config = load_config(None, sets=[*STUBBED, *settings], environ={}).config
    forgo_models(config)
    async with running_server(config) as server:
        favour_event_loop()  # as `vsched serve` does
        return [await _measure(server, load) for load in loads]


async def _measure(server: RunningServer, load: LoadOrder) -> Row:
    order = msgspec.structs.replace(load, url=server.url, model=server.engine.model_name)
    async with ready_clients(order) as clients:
        before = _spent(server)
        figures = await run_clients(clients)
        spent = [now - then for now, then in zip(_spent(server), before, strict=True)]
    values = (
        *(server.engine.config.server.processes, str(load.case), load.output_tokens or 0),
        *(load.clients, round(figures.requests_s, 1), round(figures.output_tokens_s, 1)),
        *(round(one / load.requests * 1e3, 2) for one in spent),
        round(figures.client_cpu, 2),
    )
    return dict(zip(HEADINGS, values, strict=True))


def _spent(server: RunningServer) -> tuple[float, float, float]:
    """Return the CPU time used so far by HTTP processes, the engine's process, and ranks."""
    http, ranks = (sum(map(process_s, pids)) for pids in (server.api_pids, server.engine.rank_pids))
    return http, time.process_time(), ranks


def front(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 400,
    processes: Annotated[
        str, typer.Option(help="Numbers of server.processes to compare, separated by commas.")
    ] = "1",
    out: JsonOption = None,
) -> None:
    """Serve requests without the model: short answers, long ones, images; report the cost of each."""
    console = Console()
    loads = [
        LoadOrder(case=case, output_tokens=tokens, clients=min(clients, count), requests=count)
        for case, tokens, count in (
            (Case.TEXT, SHORT_TOKENS, requests),
            (Case.TEXT, LONG_TOKENS, requests),
            (Case.IMAGE, SHORT_TOKENS, max(requests // 4, 1)),
        )
    ]
    settings = [*_ROOM, *(assignments or ()), f"model.path={path}"]
    rows: list[Row] = []
    for count in processes.split(","):
        with console.status(f"{count} processes"):
            one = [*settings, f"server.processes={count.strip()}"]
            rows += uvloop.run(measure_front(one, loads))
    table = Table(*HEADINGS.values(), title="A server whose ranks compute nothing")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    if out is not None:
        write_json(out, rows)
