"""Simulated clients: tenant, session and patience of their arrivals."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.sim.shapes import arrival
from vsched.sim import SimEngine
from vsched.sim.cluster.client_sessions import ClientBehaviour


@pytest.mark.sim
@pytest.mark.parametrize("http", [True, False])
async def test_clients_name_tenant_and_session_and_leave_in_time(http: bool) -> None:
    """As in the fast simulator; a session checks tenant and session when its request is accepted."""
    same: dict[str, Any] = {"outputs": 200, "tenant": "one"}
    long = arrival(1, 0, conversation="a talk", **same)
    short = arrival(2, 0, conversation="another", leaves_ns=50_000_000, **same)
    async with SimEngine() as engine:
        stays = engine.send(long, ClientBehaviour(http=http))
        leaves = engine.send(short, ClientBehaviour(http=http))
        await engine.heal()
    assert (stays.outcome, leaves.outcome) == ("finished", "left")
    assert leaves.ended_ns - leaves.sent_ns == 50_000_000
