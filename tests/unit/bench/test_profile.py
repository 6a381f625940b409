"""`vsched bench profile`: clocks at seams, floors, and a real server with ranks that have no model."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.unit.bench import idle_plugin
from vsched.bench.profile import Profile, Row, profile
from vsched.bench.profile_floors import MachineRates, Work, floors
from vsched.bench.profile_load import LoadOrder
from vsched.bench.profile_meter import OUTSIDE, Meter, Seam, Spent, read_cells
from vsched.bench.shapes import Case
from vsched.config import load_config

MACHINE = MachineRates(bytes_s=1e9, operations_s=1e12, message_s=1e-5)


class Parts:
    """Three functions, each the way into a component."""

    def outer(self) -> int:
        return 1 + self.inner()

    def inner(self) -> int:
        _work()
        return 1

    async def task(self) -> int:
        _work()
        await asyncio.sleep(0.02)
        _work()
        return self.inner()


def _work() -> None:
    until_ns = time.thread_time_ns() + 2_000_000
    while time.thread_time_ns() < until_ns:
        pass


def _spent(meter: Meter) -> dict[str, Spent]:
    return read_cells(meter.names, meter.cells())


def _meter() -> tuple[Meter, list[Seam]]:
    names = ("outer", "inner", "task")
    return Meter(names), [Seam(Parts, name, name) for name in names]


def test_meter_gives_time_to_the_innermost_seam_and_puts_everything_back() -> None:
    plain = Parts.outer, Parts.inner, Parts.task
    meter, seams = _meter()
    with meter.at(seams):
        assert Parts().outer() == 2
    assert (Parts.outer, Parts.inner, Parts.task) == plain
    spent = _spent(meter)
    assert (spent["outer"].calls, spent["inner"].calls) == (1, 1)
    assert spent["inner"].cpu_ns > 1.9e6 > spent["outer"].cpu_ns


async def test_meter_counts_a_coroutine_while_it_runs() -> None:
    """Twice two milliseconds, and none of the twenty that it waits; what is raised into it arrives."""
    meter, seams = _meter()
    with meter.at(seams):
        assert await Parts().task() == 1
        task = asyncio.ensure_future(Parts().task())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    spent = _spent(meter)
    assert spent["task"].calls == 2
    assert 3.9e6 < spent["task"].cpu_ns < 20e6
    assert spent[OUTSIDE].wall_ns > 20e6


def test_floors_are_bytes_over_bandwidth_and_operations_over_the_rate() -> None:
    work = Work(
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
    long = Work(
        **{name: getattr(work, name) for name in work.__struct_fields__} | {"prompt_tokens": 10**6}
    )
    assert floors(long, MACHINE)["model"] == pytest.approx(1e15 / 1e12, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(120)
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
    rows: dict[tuple[str, str], Row] = {(row.side, row.component): row for row in found.rows}
    for component in ("http", "api", "kernel", "transport", "detokenising", "streaming", "writing"):
        assert rows["server", component].token_us > 0
    for component in ("decoding", "rows", "model", "reporting"):
        assert rows["ranks", component].token_us > 0
    assert found.machine.bytes_s > 0
