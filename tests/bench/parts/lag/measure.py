"""Event loop latency while a server gets the largest legal requests: one by one, and many at once.

The server runs in this process, the clients in another. A timer due every millisecond records its
delay. Timers that would have been due during a stall count as well, so that percentiles are over
time, not over wake-ups: with a given p99, an event at a random moment waits no longer than that in
99 of 100 cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tests.bench.parts.lag.cases import LagCase, lag_cases
from tests.bench.parts.lag.client_process_main import ANSWER_S, ClientsOrder
from tests.bench.parts.lag.meter import LagMeter
from vsched.api.contract import ApiSettings
from vsched.api.http_server import favour_event_loop, forgo_models
from vsched.api.server import RunningServer, running_server
from vsched.config import load_config

SETTLE_S = 0.2


class LagRow(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of a case on the event loop.

    A `body_bytes` of 0 stands for a load of all cases; `statuses` counts responses by HTTP status.
    `lost` counts groups lost meanwhile, `heartbeats_missed` intervals in which the engine sent
    nothing to the ranks, and `peak_bytes` is the engine's peak memory. `beside_p99_ms` is the p99
    delay of an idle process on the same machine: the part caused by the machine, not the server.
    """

    name: str
    body_bytes: int
    statuses: dict[str, int]
    answer_s: float
    p50_ms: float
    p99_ms: float
    worst_ms: float
    beside_p99_ms: float
    lost: int
    heartbeats: int
    heartbeats_missed: int
    peak_bytes: int


@contextlib.asynccontextmanager
async def _metered(meter: LagMeter, beside: list[float]) -> AsyncIterator[None]:
    """Measure this loop and the loop of an idle process; the latter's percentiles are appended to `beside`."""
    process = await _start("tests.bench.parts.lag.meter", stdin=asyncio.subprocess.PIPE)
    metering = asyncio.create_task(meter.run())
    try:
        yield
    finally:
        metering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await metering
        out, _ = await process.communicate(b"")
        beside += msgspec.json.decode(out, type=list[float])


async def _start(module: str, *arguments: bytes, stdin: int | None = None) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module), *arguments, stdin=stdin, stdout=asyncio.subprocess.PIPE
    )


async def measure_lag(
    settings: Sequence[str],
    *,
    clients: int,
    seconds: float,
    requests: int = 3,
    only: str = "",
    advanced: Callable[[LagRow], None] = lambda _: None,
) -> list[LagRow]:
    """Serve every case alone, then all of them to many clients at once; return a row for each."""
    sets = [*settings, "media.allow_embeddings=true", "server.port=0"]
    config = load_config(None, sets=sets, environ={}).config
    forgo_models(config)
    rows: list[LagRow] = []
    with tempfile.TemporaryDirectory(prefix="vsched-lag-") as folder:
        async with running_server(config) as server:
            api = ApiSettings(body_bytes_max=config.server.body_bytes_max)
            cases = await asyncio.to_thread(lag_cases, server.engine.info, config.media, api)
            cases = [case for case in cases if only in case.name]
            files = [_written(Path(folder), number, case) for number, case in enumerate(cases)]
            favour_event_loop()  # as `vsched serve` does
            for case, file in zip(cases, files, strict=True):
                order = _order(server, [file], clients=1, requests=requests)
                rows.append(await _measure(server, order, case.name, len(case.body)))
                advanced(rows[-1])
            order = _order(server, files, clients=clients, seconds=seconds)
            name = f"all of them, {clients} clients, {seconds:g} s"
            rows.append(await _measure(server, order, name, 0))
            advanced(rows[-1])
    return rows


def _written(folder: Path, number: int, case: LagCase) -> tuple[str, str]:
    file = folder / f"{number}.json"
    file.write_bytes(case.body)
    return case.path, str(file) if case.body else ""


def _order(
    server: RunningServer,
    bodies: list[tuple[str, str]],
    *,
    clients: int,
    seconds: float = 0.0,
    requests: int = 0,
) -> ClientsOrder:
    where = urlsplit(server.url)
    assert where.hostname is not None
    assert where.port is not None
    return ClientsOrder(
        host=where.hostname,
        port=where.port,
        bodies=bodies,
        clients=clients,
        seconds=seconds,
        requests=requests,
    )


async def _measure(
    server: RunningServer, order: ClientsOrder, name: str, body_bytes: int
) -> LagRow:
    meter = LagMeter()
    await asyncio.sleep(SETTLE_S)
    _forget_peak()
    before, beats_before = _losses(server), _heartbeats(server)
    started = time.perf_counter()
    beside: list[float] = []
    async with _metered(meter, beside):
        process = await _start(
            "tests.bench.parts.lag.client_process_main", msgspec.json.encode(order)
        )
        try:
            async with asyncio.timeout(order.seconds + 5 * ANSWER_S):
                out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    answer_s = (time.perf_counter() - started) / max(order.requests, 1)
    statuses = msgspec.json.decode(out, type=dict[str, int]) if out else {"no answer": 1}
    p50, p99, worst = meter.percentiles_ms()
    sent, missed = _heartbeats(server)
    return LagRow(
        name=name,
        body_bytes=body_bytes,
        statuses=statuses,
        answer_s=round(answer_s, 2),
        p50_ms=round(p50, 2),
        p99_ms=round(p99, 2),
        worst_ms=round(worst, 1),
        beside_p99_ms=round(beside[1], 1),
        lost=_losses(server) - before,
        heartbeats=sent - beats_before[0],
        heartbeats_missed=missed - beats_before[1],
        peak_bytes=_peak_bytes(),
    )


def _losses(server: RunningServer) -> int:
    return sum(int(group["restarts"]) for group in server.engine.groups())


def _heartbeats(server: RunningServer) -> tuple[int, int]:
    """Return the numbers of heartbeats sent to all groups, and missed."""
    counts = [group["heartbeats"] for group in server.engine.groups()]
    return sum(one["sent"] for one in counts), sum(one["missed"] for one in counts)


def _forget_peak() -> None:
    # Linux: reset the peak of the resident set.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
