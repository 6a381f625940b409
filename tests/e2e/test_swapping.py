"""Requests that are swapped to host memory and back get the tokens of undisturbed ones, also over a loss.

The server's decisions are recorded, and replayed byte for byte.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.asking import choices, mixed_asks
from tests.e2e.conftest import assert_idle
from tests.patience import until
from vsched import Config, Engine
from vsched.record import replay

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]

SWAPPED = (
    "generate.preemption.use=youngest",
    "generate.preemption.mode=swap",
    "generate.swap_memory=64MiB",
)


async def test_swapped_requests_get_the_tokens_of_generate(
    configure: Callable[..., Config],
    expected: Callable[[str], list[list[int]]],
    tmp_path: Path,
) -> None:
    """16 requests of 0 to 4 images, 8 at a time; then again, and a rank is killed while some are swapped out.

    With one rank: `test_int8_kv.py`.
    """
    record = tmp_path / "run.vlog"
    sets = ("generate.tensor_parallel=2", f"record.path={record}")
    config = configure("nano25", *SWAPPED, *sets)
    wanted = expected("nano25")
    async with Engine(config) as engine:
        found = await choices(engine, mixed_asks(), at_once=8)
        assert [each.token_ids for each in found] == wanted
        counts = engine.statistics()["generate"]
        assert 0 < counts["swapped_in"] <= counts["swapped_out"] <= counts["preemptions"]
        asking = asyncio.create_task(choices(engine, mixed_asks(), at_once=8))
        await until(lambda: engine.statistics()["generate"]["swapped"] > 0, "a request is swapped")
        (group,) = [each for each in engine.groups() if each["name"] == "generate"]
        os.kill(group["ranks"][-1]["pid"], signal.SIGKILL)
        again = await asking
        assert [each.token_ids for each in again] == wanted
        assert engine.statistics()["generate"]["swapped_out"] > counts["swapped_out"]
        await assert_idle(engine)
    report = replay(record)
    assert report.difference is None
    assert report.events > 100
