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
from vsched.sim.fast.simulation import simulate  # noqa: E402
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
        return sorted(self._times, key=self._times.__getitem__)


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
    return seen.order()


async def send(client: Any, number: int, ask: Ask) -> tuple[str, str]:
    """Request a completion; return its request id and its name."""
    body = {
        "prompt": prompt_of(number, ask.prompt),
        "max_tokens": ask.outputs,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"x-tenant": ask.tenant}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    return response.headers["x-request-id"], ask.name


async def served_order(server: RunningServer) -> list[str]:
    """Send the requests one after another; return the order of first tokens."""
    statistics = server.engine.statistics
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        tasks = list[asyncio.Task[tuple[str, str]]]()
        for number, ask in enumerate(LOAD):
            tasks.append(asyncio.create_task(send(client, number, ask)))
            await until(lambda: known(statistics()) == len(tasks), f"{ask} arrives")
        names = dict(await asyncio.gather(*tasks))
    await assert_idle(server.engine)
    ended = {
        names[one["request_id"]]: one["ended_ns"] - one["decode_ms"] * 1e6
        for one in statistics()["recent"]
    }
    return sorted(ended, key=ended.__getitem__)


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
