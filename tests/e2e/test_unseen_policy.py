"""A policy outside vsched makes the same decisions in the simulator and in our server, from one configuration file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

from tests.e2e.conftest import SETTINGS, assert_idle  # noqa: E402
from tests.patience import PATIENCE_S, until  # noqa: E402
from tests.unit.sim.shapes import COST  # noqa: E402
from tests.unseen_policy import (  # noqa: E402
    FIRST,
    FIRST_OUTPUTS,
    KV_TOKENS,
    LOAD,
    SEATS,
    Ask,
    check_orders,
    configurations,
    prompt_of,
)
from vsched.api.server import RunningServer, running_server  # noqa: E402
from vsched.config import load_config  # noqa: E402
from vsched.kernel import Scheduler  # noqa: E402
from vsched.kernel.commands import Command, Finish  # noqa: E402
from vsched.kernel.events import Event  # noqa: E402
from vsched.sim.fast.run import simulate  # noqa: E402
from vsched.sim.workload.requests import Arrival, Text, workload_of  # noqa: E402

IN_FILE = ("generate.slots=", "generate.chunk_tokens=", "generate.max_batch_tokens=")


class FirstTokens:
    """Observes a simulation: the order of first tokens."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}

    def see(
        self, now_ns: int, event: Event, commands: Sequence[Command], kernel: Scheduler
    ) -> None:
        """Note the first tokens of requests that finish."""
        for command in commands:
            if type(command) is Finish:
                self._times[command.request_id] = command.times.first_token_ns

    def order(self) -> list[str]:
        """Return the names of the load in the order of their first tokens."""
        return [name for name in sorted(self._times, key=self._times.__getitem__) if name != FIRST]


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
        for number, one in enumerate([Ask(FIRST, "first", 20, FIRST_OUTPUTS), *LOAD])
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
    return seen.order()


async def send(client: Any, number: int, ask: Ask, started: asyncio.Event) -> tuple[str, str]:
    """Stream a completion; return its request id and its name."""
    body = {
        "prompt": prompt_of(number, ask.prompt),
        "max_tokens": ask.outputs,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream(
        "POST", "/v1/completions", json=body, headers={"x-tenant": ask.tenant}
    ) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                started.set()
        return response.headers["x-request-id"], ask.name


async def served_order(server: RunningServer) -> list[str]:
    """Send the load while the first request holds a slot; return the order of first tokens."""
    statistics, started = server.engine.statistics, asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        first = Ask(FIRST, "first", 20, FIRST_OUTPUTS)
        tasks = [asyncio.create_task(send(client, 0, first, started))]
        await asyncio.wait_for(started.wait(), PATIENCE_S)
        for number, ask in enumerate(LOAD, 1):
            tasks.append(asyncio.create_task(send(client, number, ask, asyncio.Event())))
            await until(lambda number=number: known(statistics()) > number, f"{ask} arrives")
        names = dict(await asyncio.gather(*tasks))
    await assert_idle(server.engine)
    ended = {
        names[one["request_id"]]: one["ended_ns"] - one["decode_ms"] * 1e6
        for one in statistics()["recent"]
    }
    return [name for name in sorted(ended, key=ended.__getitem__) if name != FIRST]


def known(statistics: dict[str, Any]) -> int:
    """Return the number of requests that wait, run or have ended."""
    return int(statistics["running"] + statistics["waiting"] + len(statistics["recent"]))


def test_unseen_policy_in_the_simulator(tmp_path: Path) -> None:
    tables = configurations(tmp_path)
    check_orders({name: simulated_order(path) for name, path in tables.items()})


@pytest.mark.asyncio(loop_scope="package")
async def test_unseen_policy_in_our_server(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    orders = {}
    for name, tables in configurations(tmp_path).items():
        sets = [
            *[one for one in SETTINGS if not one.startswith(IN_FILE)],
            f"model.path={checkpoints('nano25')}",
            "server.tenant_header=x-tenant",
        ]
        config = load_config(tables, sets=sets, environ={}).config
        assert config.generate.memory == {"use": "pinned", "tokens": KV_TOKENS}
        async with running_server(config) as server:
            orders[name] = await served_order(server)
            calls = server.engine.statistics()["policy_calls"]
            if name == "turns":
                assert {*calls} >= SEATS
                assert all(calls[seat]["calls"] > 0 for seat in SEATS)
    check_orders(orders)
