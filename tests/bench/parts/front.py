"""`python -m tests.bench.parts front`: rate and CPU time per request of a server whose ranks compute nothing.

The rest is HTTP, templates, tokenization, images, the scheduler and token output. Clients run in
their own process. With few or busy cores, the CPU time is more reliable than the rate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from vsched.terminal.options import SetOption

SETTINGS = (
    f"encode.plugin={NAME}",
    f"generate.plugin={NAME}",
    "placement=separate",
    "encode.threads=1",
    "generate.threads=1",
    "server.port=0",
    "generate.slots=64",
    "generate.max_waiting=4096",
    'generate.memory={use="pinned", tokens=200000}',
)
"""Enough slots that no request waits long for one; further settings may change it."""
SHORT_TOKENS, LONG_TOKENS = 8, 128
"""Tokens of a short answer and of a long one."""
HEADINGS = (
    *("processes", "case", "tokens", "clients", "requests/s", "tokens/s"),
    *("HTTP, ms a request", "engine", "ranks", "clients' cores"),
)
"""Milliseconds are CPU time per request of all HTTP processes, of the engine's process, and of all ranks.

With one process, the engine's also serves HTTP. Near 1 core, the clients limited the result.
"""


async def measure_front(settings: Sequence[str], loads: Sequence[LoadOrder]) -> list[list[str]]:
    """Serve the loads one after another; return a row for each.

    Raises:
        BenchError: When a request failed.
    """
    config = load_config(None, sets=[*SETTINGS, *settings], environ={}).config
    forgo_models(config)
    async with running_server(config) as server:
        favour_event_loop()  # as `vsched serve` does
        return [await _measure(server, load) for load in loads]


async def _measure(server: RunningServer, load: LoadOrder) -> list[str]:
    order = msgspec.structs.replace(load, url=server.url, model=server.engine.model_name)
    async with ready_clients(order) as clients:
        before = _spent(server)
        figures = await run_clients(clients)
        spent = [now - then for now, then in zip(_spent(server), before, strict=True)]
    return [
        *(str(server.engine.config.server.processes), str(load.case), str(load.output_tokens)),
        *(str(load.clients), f"{figures.requests_s:.1f}", f"{figures.output_tokens_s:.1f}"),
        *(f"{one / load.requests * 1e3:.2f}" for one in spent),
        f"{figures.client_cpu:.2f}",
    ]


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
    settings = [*(assignments or ()), f"model.path={path}"]
    table = Table(*HEADINGS, title="A server whose ranks compute nothing")
    for count in processes.split(","):
        with console.status(f"{count} processes"):
            one = [*settings, f"server.processes={count.strip()}"]
            for row in uvloop.run(measure_front(one, loads)):
                table.add_row(*row)
    console.print(table)
