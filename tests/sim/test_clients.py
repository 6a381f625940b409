"""Clients of the simulated engine send what the arrivals of a workload say."""

from __future__ import annotations

import pytest

from vsched.sim import SimEngine
from vsched.sim.cluster.client_sessions import ClientBehaviour
from vsched.sim.workload.requests import Arrival, Text


@pytest.mark.sim
@pytest.mark.parametrize("http", [True, False])
async def test_clients_name_tenant_and_session_and_leave_in_time(http: bool) -> None:
    """As in the fast simulator; a session checks tenant and session when its request is accepted."""

    def arrival(name: str, leaves_ns: int | None = None) -> Arrival:
        return Arrival(
            at_ns=0,
            request_id=name,
            prompt=(Text(1, 20),),
            output_tokens=200,
            tenant="one",
            conversation=f"talk {name}",
            leaves_ns=leaves_ns,
        )

    async with SimEngine() as engine:
        stays = engine.send(arrival("stays"), ClientBehaviour(http=http))
        leaves = engine.send(arrival("leaves", 50_000_000), ClientBehaviour(http=http))
        await engine.heal()
    assert (stays.outcome, leaves.outcome) == ("finished", "left")
    assert leaves.ended_ns - leaves.sent_ns == 50_000_000
