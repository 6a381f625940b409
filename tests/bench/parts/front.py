"""`python -m tests.bench.parts front`: rate and CPU time per request of a server whose ranks compute nothing.

The rest is HTTP, templates, tokenization, images, the scheduler and token output. Clients run in
their own process. With few or busy cores, the CPU time is more reliable than the rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated

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


class FrontRow(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one load.

    Attributes:
        processes: `server.processes`; with 1, the engine's process also serves HTTP.
        http_ms: CPU time per request of all HTTP processes other than the engine's.
        engine_ms: CPU time per request of the engine's process, all threads.
        ranks_ms: CPU time per request of all ranks, for decoding messages and writing results.
        client_cpu: Cores kept busy by the clients; near 1, the clients limited the result.
    """

    processes: int
    case: str
    output_tokens: int
    clients: int
    requests_s: float
    output_tokens_s: float
    http_ms: float
    engine_ms: float
    ranks_ms: float
    client_cpu: float


async def measure_front(
    settings: Sequence[str], loads: Sequence[LoadOrder], advanced: Callable[[FrontRow], None]
) -> list[FrontRow]:
    """Serve the loads one after another; return a row for each.

    Raises:
        BenchError: When a request failed.
    """
    config = load_config(None, sets=[*STUBBED, *settings], environ={}).config
    forgo_models(config)
    rows: list[FrontRow] = []
    async with running_server(config) as server:
        favour_event_loop()  # as `vsched serve` does
        for load in loads:
            rows.append(await _measure(server, load))
            advanced(rows[-1])
    return rows


async def _measure(server: RunningServer, load: LoadOrder) -> FrontRow:
    order = msgspec.structs.replace(load, url=server.url, model=server.engine.model_name)
    async with ready_clients(order) as clients:
        before = _spent(server)
        figures = await run_clients(clients)
        spent = [now - then for now, then in zip(_spent(server), before, strict=True)]
    http_ms, engine_ms, ranks_ms = (round(one / load.requests * 1e3, 2) for one in spent)
    return FrontRow(
        processes=server.engine.config.server.processes,
        case=str(load.case),
        output_tokens=load.output_tokens or 0,
        clients=load.clients,
        requests_s=round(figures.requests_s, 1),
        output_tokens_s=round(figures.output_tokens_s, 1),
        http_ms=http_ms,
        engine_ms=engine_ms,
        ranks_ms=ranks_ms,
        client_cpu=round(figures.client_cpu, 2),
    )


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

    def advanced(row: FrontRow) -> None:
        console.print(f"[dim]{row.processes} processes, {row.case}: done[/dim]")

    rows: list[FrontRow] = []
    for count in processes.split(","):
        one = [*settings, f"server.processes={count.strip()}"]
        rows += uvloop.run(measure_front(one, loads, advanced))
    names = ("processes", "case", "tokens", "clients", "requests/s", "tokens/s")
    costs = ("HTTP, ms a request", "engine", "ranks", "clients' cores")
    table = Table(*names, *costs, title="A server whose ranks compute nothing")
    for row in rows:
        table.add_row(*map(str, msgspec.structs.astuple(row)))
    console.print(table)
    if out is not None:
        write_json(out, rows)
