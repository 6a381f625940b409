"""Simulated clients: tenant, session, patience, adapter, cache salt and pictures of their arrivals."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.sim.shapes import arrival
from vsched.config.sections import AdaptersConfig
from vsched.errors import ConfigError
from vsched.sim import Image, SimEngine, Text, Video, small_config
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


@pytest.mark.sim
@pytest.mark.parametrize("http", [True, False])
async def test_clients_name_adapter_and_salt_and_large_pictures_are_scaled_down(http: bool) -> None:
    """Sessions check all of it; an image is encoded once for each salt."""
    names = AdaptersConfig(count_max=2, load={"one": "", "two": ""}, directory="/any", load_s=10.0)
    parts = Image("x", 500), Text(1, 5)
    async with SimEngine(small_config(adapters=names)) as engine:
        for number, (adapter, salt) in enumerate([("two", "s"), ("", "s"), ("one", ""), ("", "")]):
            request = arrival(number, 0, *parts, adapter=adapter, cache_salt=salt, tenant="t")
            engine.send(request, ClientBehaviour(http=http))
        engine.send(arrival(4, 0, Video("v", 2, 200)), ClientBehaviour(http=http))
        with pytest.raises(ConfigError, match=r"r5: no adapter 'three'. Remedy: add it to"):
            engine.send(arrival(5, 0, adapter="three"))
        await engine.heal()
        assert {session.outcome for session in engine.sessions} == {"finished"}
        assert engine.engine.statistics()["encode"]["cache_misses"] == 2 + 2


@pytest.mark.sim
async def test_own_requests_of_a_test_are_none_of_its_sessions() -> None:
    async with SimEngine() as engine:
        await engine.send(arrival(0, 0)).done.wait()
        body = {"messages": [{"role": "user", "content": "5 6"}], "max_tokens": 3, "seed": 0}
        response = await engine.client.request("POST", "/v1/chat/completions", json=body)
        assert response.status == 200
