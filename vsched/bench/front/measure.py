"""Requests a second that a server takes whose ranks compute nothing, and the processor time of each process for one.

What is left is HTTP, templates, tokenizing, images, the scheduler and the way of tokens back. Clients run in a process
of their own. Where cores are few or busy, the rate says little and the processor time all the more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from vsched.api.listening.http_server import favour_event_loop, forgo_models
from vsched.api.server import RunningServer, running_server
from vsched.bench.front.stub_plugin import NAME
from vsched.bench.load.client_process_main import LoadOrder
from vsched.bench.load.client_processes import ready_clients, run_clients
from vsched.bench.load.figures import Figures
from vsched.bench.load.shapes import Case
from vsched.bench.report.machine import process_s
from vsched.config import load_config

STUBBED = (
    f"encode.plugin={NAME}",
    f"generate.plugin={NAME}",
    "placement=separate",
    "encode.threads=1",
    "generate.threads=1",
    "server.port=0",
)


class FrontLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One load: `requests` of a case by so many clients at a time, each answered with `output_tokens`."""

    case: Case
    output_tokens: int
    clients: int
    requests: int


class FrontRow(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one load.

    Attributes:
        engine_ms: Processor time of the engine's process for a request, all its threads together.
        ranks_ms: That of all ranks, which is decoding messages and writing results.
        client_cpu: Cores that the clients kept busy; near 1 they are what was measured.
    """

    case: str
    output_tokens: int
    clients: int
    requests_s: float
    output_tokens_s: float
    engine_ms: float
    ranks_ms: float
    client_cpu: float


async def measure_front(
    settings: Sequence[str], loads: Sequence[FrontLoad], advanced: Callable[[FrontRow], None]
) -> list[FrontRow]:
    """Serve each load, one after the other; return a row for each.

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


async def _measure(server: RunningServer, load: FrontLoad) -> FrontRow:
    order = LoadOrder(
        case=load.case,
        clients=load.clients,
        requests=load.requests,
        output_tokens=load.output_tokens,
        url=server.url,
        model=server.engine.model_name,
    )
    async with ready_clients(order) as clients:
        pids = server.engine.rank_pids
        engine_s, ranks_s = time.process_time(), sum(map(process_s, pids))
        figures = await run_clients(clients)
        engine_s = time.process_time() - engine_s
        ranks_s = sum(map(process_s, pids)) - ranks_s
    return front_row(load, figures, engine_s=engine_s, ranks_s=ranks_s)


def front_row(load: FrontLoad, figures: Figures, *, engine_s: float, ranks_s: float) -> FrontRow:
    """Return what a load came to, from what clients saw and processes took."""
    return FrontRow(
        case=str(load.case),
        output_tokens=load.output_tokens,
        clients=load.clients,
        requests_s=round(figures.requests_s, 1),
        output_tokens_s=round(figures.output_tokens_s, 1),
        engine_ms=round(engine_s / load.requests * 1e3, 2),
        ranks_ms=round(ranks_s / load.requests * 1e3, 2),
        client_cpu=round(figures.client_cpu, 2),
    )
