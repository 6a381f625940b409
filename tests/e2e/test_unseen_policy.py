"""A policy outside vsched makes the same decisions in the simulator and in our engine, from one configuration file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e.asking import read
from tests.e2e.conftest import SETTINGS, assert_idle
from tests.patience import patience
from tests.unit.sim.shapes import COST
from tests.unseen_policy import KV_TOKENS, LOAD, SEATS, check_orders, configurations, prompt_of
from vsched import Engine, SamplingParams
from vsched.config import load_config
from vsched.kernel import Scheduler
from vsched.kernel.commands import Command, Finish
from vsched.kernel.events import Event
from vsched.sim.fast.simulation import simulate
from vsched.sim.workload.requests import Arrival, Text, workload_of

IN_FILE = ("generate.slots=", "generate.chunk_tokens=", "generate.max_batch_tokens=")


class FirstTokens(dict[str, int]):
    """Observes a simulation: the times of first tokens."""

    def see(self, _now: int, _event: Event, commands: Sequence[Command], _: Scheduler) -> None:
        """Note the first tokens of requests that finish."""
        for command in commands:
            if type(command) is Finish:
                self[command.request_id] = command.times.first_token_ns


def simulated_order(tables: Path) -> list[str]:
    """Simulate the load."""
    arrivals = [
        Arrival(
            at_ns=number * 1000,
            request_id=one.name,
            tenant=one.tenant,
            prompt=(Text(number, one.prompt),),
            output_tokens=one.outputs,
        )
        for number, one in enumerate(LOAD)
    ]
    seen = FirstTokens()
    outcome = simulate(
        load_config(tables, environ={}),
        workload_of("unseen", arrivals),
        cost=COST,
        kv_tokens=KV_TOKENS,
        observers=[seen],
        oracles=True,
    )
    assert not outcome.policy_failure_counts
    return sorted(seen, key=seen.__getitem__)


async def served_order(engine: Engine) -> list[str]:
    """Send the requests one after another; return the order of first tokens."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=LOAD[0].outputs)
    async with patience():
        streams = [
            await engine.generate(
                prompt=prompt_of(number, ask.prompt),
                sampling=sampling,
                request_id=ask.name,
                tenant=ask.tenant,
            )
            for number, ask in enumerate(LOAD)
        ]
        await asyncio.gather(*map(read, streams))
    await assert_idle(engine)
    recent = engine.statistics()["recent"]
    firsts = {one["request_id"]: one["ended_ns"] - one["decode_ms"] * 1e6 for one in recent}
    return sorted(firsts, key=firsts.__getitem__)


def test_unseen_policy_in_the_simulator(tmp_path: Path) -> None:
    tables = configurations(tmp_path)
    check_orders({name: simulated_order(path) for name, path in tables.items()})


@pytest.mark.asyncio(loop_scope="package")
async def test_unseen_policy_in_engine(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    orders = {}
    for name, tables in configurations(tmp_path).items():
        sets = [one for one in SETTINGS if not one.startswith(IN_FILE)]
        sets.append(f"model.path={checkpoints('nano25')}")
        config = load_config(tables, sets=sets, environ={}).config
        assert config.generate.memory == {"use": "pinned", "tokens": KV_TOKENS}
        async with Engine(config) as engine:
            orders[name] = await served_order(engine)
            calls = engine.statistics()["policy_calls"]
            if name == "turns":
                assert {*calls} >= SEATS
                assert all(calls[seat]["calls"] > 0 for seat in SEATS)
    check_orders(orders)
