"""Time spent on a served load, by component, next to the lower bound of each.

The real server runs in this process, its ranks and the clients in their own. Timers are installed
at the probe points between components while it runs (see `meter`); CPU time is the system's. A
timer costs 0.2 µs at a nested probe point and 2 µs at an outermost one, so components entered for
every token appear slightly more expensive than they are.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tests.bench.parts.profile import rank as profile_rank
from tests.bench.parts.profile.floors import LoadWork, MachineRates, floors, measure_machine
from tests.bench.parts.profile.meter import OUTSIDE, Meter, ProbePoint, TimeSpent, read_cells
from vsched.aio.environment import Environment, make_launcher
from vsched.aio.leader.leader import Leader
from vsched.aio.shell import Shell
from vsched.aio.streams.table import StreamTable
from vsched.api.completions import CompletionEndpoint
from vsched.api.http_exchange import HttpExchange
from vsched.api.server import running_server
from vsched.bench.load.client_processes import LoadOrder, begin_clients, figures_of, ready_clients
from vsched.bench.load.generator import Figures, draw
from vsched.bench.machine import TICK_S, OtherLoad
from vsched.config import Config
from vsched.engine import Engine, Progress
from vsched.kernel import Scheduler
from vsched.media import fills
from vsched.media.measure import Measurer
from vsched.transport.zmq_link import LeaderLink
from vsched.worker.contract import extent_bytes

COMPONENTS = (
    "http",
    "api",
    "preprocessing",
    "kernel",
    "shell",
    "transport",
    "detokenising",
    "streaming",
    "writing",
)
SEAMS = (
    ProbePoint(HttpToolsProtocol, "data_received", "http"),
    ProbePoint(RequestResponseCycle, "run_asgi", "http"),
    ProbePoint(CompletionEndpoint, "__call__", "api"),
    ProbePoint(Measurer, "measure", "preprocessing"),
    ProbePoint(fills, "process", "preprocessing"),
    ProbePoint(Scheduler, "handle", "kernel"),
    ProbePoint(Shell, "handle", "shell"),
    ProbePoint(Leader, "decide", "transport"),
    ProbePoint(LeaderLink, "read", "transport"),
    ProbePoint(StreamTable, "emit", "detokenising"),
    ProbePoint(StreamTable, "finish", "detokenising"),
    ProbePoint(StreamTable, "_deliver", "streaming"),
    ProbePoint(CompletionEndpoint, "_stream", "streaming"),
    ProbePoint(HttpExchange, "send_event_nowait", "writing"),
)
PREPROCESSOR_METHODS = ("render", "tokenize", "expand")
EVENT_LOOP = "event loop"
OTHER_THREADS = "other threads"
_START_POLL_S = 0.005


class ProfileRow(msgspec.Struct, frozen=True, kw_only=True):
    """One component of one side: `server` or `ranks`. CPU time, in microseconds.

    `share` is a share of a core; `floor_us` is per token, None if there is no lower bound.
    """

    side: str
    component: str
    request_us: float
    token_us: float
    share: float
    floor_us: float | None = None


class Profile(msgspec.Struct, kw_only=True):
    """Format of the `--json` report.

    Attributes:
        model_ms: Wall time of the model and sampling per step of the generate ranks.
        overhead_ms: Wall time of a step in addition to that, while there was always a step to run.
        others: Cores kept busy by everything except the server, its ranks and the clients.
    """

    case: str
    clients: int
    requests: int
    output_tokens: int
    wall_s: float
    requests_s: float
    steps: int
    step_ms: float
    model_ms: float
    overhead_ms: float
    server_resident_bytes: int
    others: float
    machine: MachineRates
    rows: list[ProfileRow]


class Snapshot(msgspec.Struct, frozen=True):
    """Timers at one moment: cells of the server and of all ranks, CPU time of the loop's thread and others."""

    at_s: float
    server: list[int]
    ranks: list[int]
    loop_s: float
    threads_s: float


class ProfileWindow(msgspec.Struct, frozen=True):
    """Differences between two snapshots."""

    wall_s: float
    server: dict[str, TimeSpent]
    ranks: dict[str, TimeSpent]
    loop_s: float
    threads_s: float
    others: float


async def profile(config: Config, order: LoadOrder, *, on_progress: Progress) -> Profile:
    """Serve a load, `order` without its address, and return the time by component.

    Raises:
        BenchError: When a request failed.
        CheckpointError, ConfigError, DeviceOutOfMemory, GroupLostError: When the engine cannot
            start.
    """
    machine = await asyncio.to_thread(measure_machine)
    meter = Meter(COMPONENTS)
    with tempfile.TemporaryDirectory(prefix="vsched-profile-") as name:
        folder = Path(name)
        command = ("-m", "tests.bench.parts.profile.rank", name)
        around = Environment(make_launcher=partial(make_launcher, command=command))
        with meter.at(SEAMS):
            async with running_server(
                config, on_progress=on_progress, environment=around
            ) as running:
                engine = running.engine
                probe_points = [
                    ProbePoint(type(engine.preprocessor), method, "preprocessing")
                    for method in PREPROCESSOR_METHODS
                ]
                sent = msgspec.structs.replace(order, url=running.url, model=engine.model_name)
                with meter.at(probe_points):
                    window, figures = await _measure(sent, meter, engine, folder)
                work = _work(order, engine, figures, window)
                resident = int(engine.statistics()["memory"]["engine_resident"])
    return _profile(window, figures, work, machine, resident)


async def _measure(
    order: LoadOrder, meter: Meter, engine: Engine, folder: Path
) -> tuple[ProfileWindow, Figures]:
    async with ready_clients(order) as process:
        started = _http_calls(meter)
        begin_clients(process)
        while _http_calls(meter) == started:  # noqa: ASYNC110 - a server that is measured tells nobody
            await asyncio.sleep(_START_POLL_S)
        before = _snapshot(meter, engine, folder)
        others = OtherLoad(lambda: [*engine.rank_pids, process.pid])
        figures = await figures_of(process)
        after = _snapshot(meter, engine, folder)
        cores = others.cores()
    return _window(meter, before, after, cores), figures


def _http_calls(meter: Meter) -> int:
    """Return the number of calls of the HTTP component: the first request shows that the clients are ready."""
    return meter.cells()[meter.names.index("http")]


def _snapshot(meter: Meter, engine: Engine, folder: Path) -> Snapshot:
    ranks = [profile_rank.cells_of(folder, pid) for pid in engine.rank_pids]
    return Snapshot(
        at_s=time.perf_counter(),
        server=meter.cells(),
        ranks=[sum(column) for column in zip(*ranks, strict=True)],
        loop_s=time.thread_time(),
        threads_s=_other_threads_s(),
    )


def _window(meter: Meter, before: Snapshot, after: Snapshot, others: float) -> ProfileWindow:
    server, ranks = (
        [late - early for late, early in zip(ends, starts, strict=True)]
        for ends, starts in ((after.server, before.server), (after.ranks, before.ranks))
    )
    return ProfileWindow(
        wall_s=after.at_s - before.at_s,
        server=read_cells(meter.names, server),
        ranks=read_cells(profile_rank.NAMES, ranks),
        loop_s=after.loop_s - before.loop_s,
        threads_s=after.threads_s - before.threads_s,
        others=others,
    )


def _other_threads_s() -> float:
    """Return the CPU time of all threads of this process except the event loop's."""
    own = os.times()
    return max(own.user + own.system - time.thread_time(), 0.0) // TICK_S * TICK_S


def _work(order: LoadOrder, engine: Engine, figures: Figures, window: ProfileWindow) -> LoadWork:
    info, plan = engine.info, order.plan()
    # Bodies of other seeds have the same length.
    (messages,) = draw(replace(plan, sessions=1)).sessions[0]
    body_bytes = len(order.body(messages, plan.shape.output_tokens)) * figures.requests
    rows = image_bytes = 0
    if order.case != "text":
        arrays = engine.preprocessor.plan_image(*2 * [order.image_pixels]).arrays
        # One row per patch, as in the model families measured here.
        rows = max(arrays, key=lambda spec: spec.nbytes).shape[0]
        image_bytes = 3 * order.image_pixels**2 + extent_bytes(arrays)
    weights = {
        group.partition("-")[0]: sum(rank.get("weights", 0) for rank in ranks.values())
        for group, ranks in engine.statistics()["ranks"].items()
    }
    return LoadWork(
        body_bytes=body_bytes,
        pixel_bytes=image_bytes * figures.requests,
        chunks=window.server["writing"].calls,
        steps=window.ranks["model"].calls,
        prompt_tokens=round(figures.prompt_tokens_mean * figures.requests),
        output_tokens=round(figures.output_tokens_mean * figures.requests),
        context_tokens=figures.prompt_tokens_mean + figures.output_tokens_mean / 2,
        kv_bytes_per_token=info.kv_bytes_per_token,
        logit_bytes=info.vocab_size * info.itemsize,
        weight_bytes=weights["generate"],
        itemsize=info.itemsize,
        patches=rows * figures.requests,
        tower_bytes=weights.get("encode", 0),
    )


def _profile(
    window: ProfileWindow,
    figures: Figures,
    work: LoadWork,
    machine: MachineRates,
    resident: int,
) -> Profile:
    wall_s, spent = window.wall_s, window.ranks
    least_s = floors(work, machine)
    requests, tokens = figures.requests, work.output_tokens
    server = _server_s(window)
    ranks = {name: one.cpu_ns / 1e9 for name, one in spent.items() if one.cpu_ns > 0}
    rows = [
        ProfileRow(
            side=side,
            component=component,
            request_us=seconds / requests * 1e6,
            token_us=seconds / tokens * 1e6,
            share=seconds / wall_s,
            floor_us=least_s[component] / tokens * 1e6 if component in least_s else None,
        )
        for side, components in (("server", server), ("ranks", ranks))
        for component, seconds in components.items()
    ]
    model_s = (spent["model"].wall_ns + spent["sampling"].wall_ns) / 1e9
    return Profile(
        case=figures.case,
        clients=figures.concurrency,
        requests=requests,
        output_tokens=tokens,
        wall_s=wall_s,
        requests_s=figures.requests_s,
        steps=work.steps,
        step_ms=wall_s / work.steps * 1e3,
        model_ms=model_s / work.steps * 1e3,
        overhead_ms=(wall_s - model_s) / work.steps * 1e3,
        server_resident_bytes=resident,
        others=window.others,
        machine=machine,
        rows=rows,
    )


def _server_s(window: ProfileWindow) -> Mapping[str, float]:
    """Return the seconds of each component; time outside all timers belongs to the event loop, or to other threads."""
    seconds = {name: one.cpu_ns / 1e9 for name, one in window.server.items() if name != OUTSIDE}
    # Preprocessing threads have timers of their own; the rest of the thread time is ZeroMQ's.
    outside_s = window.loop_s + window.threads_s - sum(seconds.values())
    seconds[EVENT_LOOP] = min(window.server[OUTSIDE].cpu_ns / 1e9, max(outside_s, 0.0))
    seconds[OTHER_THREADS] = max(outside_s - seconds[EVENT_LOOP], 0.0)
    return seconds
