"""A KV cache in 8 bits: the tokens do not depend on pressure, swapping, ranks and losses, and records replay."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.asking import choices, mixed_asks
from tests.e2e.conftest import assert_idle
from tests.patience import until
from vsched import Config, Engine
from vsched.record import replay

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]

INT8 = "generate.kv_dtype=int8"
SWAPS = ("generate.preemption.mode=swap", "generate.swap_memory=64MiB")


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def wanted(configure: Callable[..., Config]) -> list[list[int]]:
    """The tokens of 16 undisturbed requests."""
    async with Engine(configure("nano25", INT8)) as engine:
        found = await choices(engine, mixed_asks(), at_once=1)
        assert engine.statistics()["generate"]["preemptions"] == 0
    return [each.token_ids for each in found]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(1, SWAPS, id="swapped", marks=pytest.mark.thorough),
        pytest.param(2, (), id="two ranks"),
    ],
)
async def test_int8_requests_get_their_tokens_under_pressure_and_over_a_loss(
    ranks: int,
    more: tuple[str, ...],
    configure: Callable[..., Config],
    wanted: list[list[int]],
    tmp_path: Path,
) -> None:
    record = tmp_path / "run.vlog"
    sets = (INT8, f"generate.tensor_parallel={ranks}", f"record.path={record}", *more)
    async with Engine(configure("nano25", *sets)) as engine:
        assert engine.info.kv_dtype == "int8"
        found = await choices(engine, mixed_asks(), at_once=8)
        assert [each.token_ids for each in found] == wanted
        counts = engine.statistics()["generate"]
        assert counts["preemptions"] > 0
        assert counts["tokens_cached"] > 0
        assert (counts["swapped_in"] > 0) == bool(more)
        asking = asyncio.create_task(choices(engine, mixed_asks(), at_once=8))
        await until(
            lambda: engine.statistics()["generate"]["preemptions"] > counts["preemptions"],
            "a request is preempted",
        )
        (group,) = [each for each in engine.groups() if each["name"] == "generate"]
        os.kill(group["ranks"][-1]["pid"], signal.SIGKILL)
        assert [each.token_ids for each in await asking] == wanted
        await assert_idle(engine)
    assert replay(record).difference is None
