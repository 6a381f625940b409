"""Hostile schemas and grammars over HTTP, in every field; `python -m tests.fuzz` sends many more."""

from __future__ import annotations

import pytest

from tests.fuzz.grammars import fuzz_grammars
from vsched import Engine
from vsched.api.server import RunningServer

COUNT = 150


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="package")
async def test_hostile_schemas_and_grammars_are_answered(
    server: RunningServer, engine: Engine
) -> None:
    """No rank and no plain request fails because of them; and some are served, so that ranks apply them."""
    ranks = engine.rank_pids
    counted = await fuzz_grammars(server.url, "nano25", seed=1, count=COUNT)
    assert engine.state == "ready"
    assert engine.rank_pids == ranks
    statuses = {status: counted[f"schema: {status}"] for status in (200, 400)}
    assert min(statuses.values()) > COUNT // 20, counted
    assert counted["plain: 200"]
