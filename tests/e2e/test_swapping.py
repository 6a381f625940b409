"""Preempted requests, swapped or not, get the tokens of undisturbed ones, also over losses, and with an int8 KV cache.

In groups of two ranks, of which each stage may have two. The server's decisions are recorded, and replayed byte for
byte.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.asking import choices, mixed_asks
from tests.e2e.conftest import TIGHT, assert_idle
from tests.patience import until
from vsched import Config, Engine
from vsched.record import replay

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]

INT8 = "generate.kv_dtype=int8"
TWO_RANKS = "generate.tensor_parallel=2"
YOUNGEST = "generate.preemption.use=youngest"
SWAPS = ("generate.preemption.mode=swap", "generate.swap_memory=64MiB")
REPLICAS = (
    "encode.replicas=2",
    "encode.tensor_parallel=2",
    "generate.replicas=2",
    "encode.eviction.use=none",  # so that both encoders have work
)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def int8(configure: Callable[..., Config]) -> list[list[int]]:
    """The tokens of 16 undisturbed requests."""
    async with Engine(configure("nano25", INT8)) as engine:
        found = await choices(engine, mixed_asks(), at_once=1)
        assert engine.statistics()["generate"]["preemptions"] == 0
    return [each.token_ids for each in found]


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param((TWO_RANKS, INT8, YOUNGEST, *SWAPS), id="int8 swapped"),
        pytest.param((TWO_RANKS, YOUNGEST, *SWAPS), id="swapped", marks=pytest.mark.thorough),
        pytest.param((TWO_RANKS, INT8), id="int8", marks=pytest.mark.thorough),
        pytest.param((TWO_RANKS, *REPLICAS), id="replicas", marks=pytest.mark.thorough),
    ],
)
async def test_preempted_requests_get_their_tokens_also_over_a_loss(
    sets: tuple[str, ...],
    configure: Callable[..., Config],
    expected: Callable[[str], list[list[int]]],
    int8: list[list[int]],
    tmp_path: Path,
) -> None:
    """16 requests of 0 to 4 images, 8 at a time per replica; ranks are killed while some wait to go on."""
    wanted = int8 if INT8 in sets else expected("nano25")
    swaps, replicas = SWAPS[0] in sets, REPLICAS[0] in sets
    record = tmp_path / "run.vlog"
    async with Engine(configure("nano25", *sets, TIGHT, f"record.path={record}")) as engine:
        assert engine.info.kv_dtype == ("int8" if INT8 in sets else "auto")
        at_once = 16 if replicas else 8
        asking = asyncio.create_task(choices(engine, mixed_asks(), at_once=at_once))

        def counts() -> dict[str, int]:
            now: dict[str, int] = engine.statistics()["generate"]
            return now

        await until(lambda: counts()["swapped" if swaps else "preemptions"], "one is preempted")
        killed = {each["stage"]: each for each in engine.groups()[::-1]}
        if not replicas:
            del killed["encode"]
        for group in killed.values():
            os.kill(group["ranks"][-1]["pid"], signal.SIGKILL)
        assert [each.token_ids for each in await asking] == wanted
        await until(lambda: engine.state == "ready", "the lost groups are back")
        lost = {each["name"] for each in engine.groups() if each["restarts"]}
        assert lost == {group["name"] for group in killed.values()}
        assert min(engine.statistics()["busy_ms"].values()) > 0, "each replica has had work"
        assert counts()["preemptions"] >= counts()["swapped_out"] >= counts()["swapped_in"]
        assert counts()["preemptions"] > 0
        assert counts()["tokens_cached"] > 0
        assert (counts()["swapped_in"] > 0) == swaps
        await assert_idle(engine)
    report = replay(record)
    assert report.difference is None
    assert report.events > 100
