"""The profile benchmark: clocks at probe points, floors, and a real server with ranks that have no model."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.bench.parts.profile.floors import LoadWork, MachineRates, floors
from tests.bench.parts.profile.measure import Profile, ProfileRow, profile
from tests.bench.parts.profile.meter import OUTSIDE, Meter, ProbePoint, read_cells
from tests.unit.bench import idle_plugin
from vsched.bench.load.client_processes import LoadOrder
from vsched.bench.load.shapes import Case
from vsched.config import load_config

MACHINE = MachineRates(bytes_s=1e9, operations_s=1e12, message_s=1e-5)


class Clocks:
    """A wall clock and a thread's CPU clock that only tests advance, in milliseconds."""

    def __init__(self) -> None:
        self.wall_ns = self.cpu_ns = 0

    def work(self, ms: int) -> None:
        self.cpu_ns += ms * 10**6
        self.wait(ms)

    def wait(self, ms: int) -> None:
        self.wall_ns += ms * 10**6


class Parts:
    """Three functions, each the entry point of a component."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks

    def outer(self) -> int:
        self._clocks.work(1)
        return 1 + self.inner()

    def inner(self) -> int:
        self._clocks.work(2)
        return 1

    async def task(self) -> int:
        self._clocks.work(3)
        await asyncio.sleep(0)
        self._clocks.work(4)
        return self.inner()


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """Return the clocks of every meter that this test makes."""
    found = Clocks()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: found.wall_ns)
    return found


def _meter(clocks: Clocks) -> tuple[Meter, list[ProbePoint]]:
    names = ("outer", "inner", "task")
    meter = Meter(names, cpu_clock=lambda: clocks.cpu_ns)
    return meter, [ProbePoint(Parts, name, name) for name in names]


def _spent_ms(meter: Meter) -> dict[str, tuple[int, float, float]]:
    """Return the calls, wall time and CPU time of each component."""
    spent = read_cells(meter.names, meter.cells())
    return {name: (one.calls, one.wall_ns / 1e6, one.cpu_ns / 1e6) for name, one in spent.items()}


def test_meter_gives_time_to_the_innermost_seam_and_puts_everything_back(clocks: Clocks) -> None:
    plain = Parts.outer, Parts.inner, Parts.task
    meter, probe_points = _meter(clocks)
    with meter.at(probe_points):
        assert Parts(clocks).outer() == 2
    assert (Parts.outer, Parts.inner, Parts.task) == plain
    nothing = (0, 0.0, 0.0)
    spent = {OUTSIDE: nothing, "outer": (1, 1.0, 1.0), "inner": (1, 2.0, 2.0), "task": nothing}
    assert _spent_ms(meter) == spent


async def test_meter_counts_a_coroutine_while_it_runs(clocks: Clocks) -> None:
    """Not while it waits; exceptions raised into it arrive."""
    meter, probe_points = _meter(clocks)
    with meter.at(probe_points):
        assert await Parts(clocks).task() == 1
        task = asyncio.ensure_future(Parts(clocks).task())
        asyncio.get_running_loop().call_soon(clocks.wait, 20)
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert _spent_ms(meter) == {
        OUTSIDE: (0, 20.0, 0.0),
        "outer": (0, 0.0, 0.0),
        "inner": (1, 2.0, 2.0),
        "task": (2, 3.0 + 4.0 + 3.0, 3.0 + 4.0 + 3.0),
    }


def test_floors_are_bytes_over_bandwidth_and_operations_over_the_rate() -> None:
    work = LoadWork(
        body_bytes=10**9,
        pixel_bytes=0,
        chunks=100,
        steps=10,
        prompt_tokens=0,
        output_tokens=1,
        context_tokens=0,
        kv_bytes_per_token=0,
        logit_bytes=0,
        weight_bytes=10**9,
        itemsize=2,
    )
    found = floors(work, MACHINE)
    assert found["http"] == 1
    assert found["writing"] == pytest.approx(1e-3)
    assert found["model"] == 10, "ten steps read the weights"
    assert floors(work, MACHINE)["vision"] == 0
    long = LoadWork(
        **{name: getattr(work, name) for name in work.__struct_fields__} | {"prompt_tokens": 10**6}
    )
    assert floors(long, MACHINE)["model"] == pytest.approx(1e15 / 1e12, rel=1e-3)


@pytest.mark.slow
@pytest.mark.thorough
async def test_profile_shows_every_component_of_server_and_ranks() -> None:
    name = idle_plugin.NAME
    sets = ["model.path=.", "server.port=0", "media.images_max=0", "encode.reserved=0"]
    sets += [f"{stage}.plugin={name}" for stage in ("encode", "generate")]
    sets += ["generate.memory.use=pinned", "generate.memory.tokens=65536"]
    config = load_config(None, sets=sets, environ={}).config
    order = LoadOrder(case=Case.TEXT, clients=2, requests=4, output_tokens=8)
    found: Profile = await profile(config, order, on_progress=lambda *_: None)
    assert (found.requests, found.output_tokens) == (4, 32)
    assert found.steps >= 8
    assert 0 < found.model_ms < found.step_ms
    rows: dict[tuple[str, str], ProfileRow] = {(row.side, row.component): row for row in found.rows}
    for component in ("http", "api", "kernel", "transport", "detokenising", "streaming", "writing"):
        assert rows["server", component].token_us > 0
    for component in ("decoding", "rows", "model", "reporting"):
        assert rows["ranks", component].token_us > 0
    assert found.machine.bytes_s > 0
