"""Several real rank processes as one group: they agree, divergence is detected, and they idle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.patience import NEVER_S, PATIENCE_S, until
from tests.unit.rank.fake_plugin import Behaviour
from tests.unit.rank.worker_groups import Place, Received, is_running, limits
from vsched.aio.worker_groups import WorkerGroup
from vsched.kernel.decisions import ChunkPlan, GenerateDecision, Join, RequestData
from vsched.types import SamplingParams

pytestmark = pytest.mark.slow

IDLE_BEATS = int(os.environ.get("VSCHED_IDLE_BEATS", "3"))
PROMPT = (7).to_bytes(4, "little") * 3


def first_step() -> GenerateDecision:
    """A request of three tokens with a high limit; it decodes in every later step."""
    data = RequestData(PROMPT, 3, [], SamplingParams(temperature=0.0, max_tokens=390), ())
    blocks = list(range(100))
    return GenerateDecision(
        1, joined=[Join(1, 0, 0, 3, blocks, data)], chunks=[ChunkPlan(0, 0, 3, [])]
    )


async def answered(received: Received, count: int) -> None:
    """Wait for this number of results, or until something is lost."""
    await received.wait_until(lambda: len(received.results) >= count or received.lost)


async def steps(worker_group: WorkerGroup, received: Received, count: int) -> None:
    """Run steps in a new group, or until something is lost."""
    leader = worker_group.leader("generate")
    for step in range(1, count + 1):
        leader.decide(first_step() if step == 1 else GenerateDecision(step))
        await answered(received, step)


@asynccontextmanager
async def started(worker_group: WorkerGroup) -> AsyncIterator[None]:
    """Start a worker group, and leave no process behind, stopped or not."""
    try:
        await worker_group.start()
        yield
    finally:
        await worker_group.stop(grace_s=0)


async def test_group_of_ranks_that_differ_is_lost(place: Place) -> None:
    """One token of one rank differs: the error names rank and step, and the group stops."""
    received = Received()
    worker_group = place.worker_group(
        received.events, ranks=2, behaviour=Behaviour(differ_rank=1, differ_at=5)
    )
    async with started(worker_group):
        await steps(worker_group, received, 20)
        await received.wait_until(lambda: received.lost)
        ((groups, reason),) = received.lost
        assert groups == ["generate"]
        assert reason == "generate: rank 1 has another result of step 3 than rank 0 (RankDesync)"
        assert len(received.results) >= 2


async def test_group_of_ranks_runs_hooks_at_one_place(place: Place, tmp_path: Path) -> None:
    """Every rank runs a hook that is due between the same two steps."""
    received = Received()
    behaviour = Behaviour(hook_s=0.001, notes=str(tmp_path))
    worker_group = place.worker_group(received.events, ranks=2, behaviour=behaviour)
    async with started(worker_group):
        await steps(worker_group, received, 30)
        assert received.lost == []
        await worker_group.stop()  # until then, the second rank is not waited for
    noted = [(tmp_path / f"hooks-{rank}").read_text() for rank in (0, 1)]
    assert noted[0] == noted[1]
    assert noted[0].startswith("balance ")


async def test_group_rank_that_is_stopped_in_a_step_is_found(place: Place) -> None:
    """By the timeout of ranks, not that of steps; a step that is merely long is not killed."""
    received = Received()
    worker_group = place.worker_group(
        received.events,
        ranks=2,
        behaviour=Behaviour(step_s=NEVER_S, slow_at=5),
        limits=limits(rank_timeout_s=1.5, heartbeat_s=0.1),
    )
    async with started(worker_group):
        await steps(worker_group, received, 2)
        worker_group.leader("generate").decide(GenerateDecision(3))
        await asyncio.sleep(0.1)
        os.kill(worker_group.pids[1], signal.SIGSTOP)
        await received.wait_until(lambda: received.lost)
        assert received.lost[0][1].startswith("generate: rank 1 was silent for ")
        pids = worker_group.pids
    assert not any(is_running(pid) for pid in pids)


async def test_group_of_ranks_idles(place: Place, tmp_path: Path) -> None:
    """Idle for VSCHED_IDLE_BEATS heartbeats: alive, and then at work."""
    received = Received()
    worker_group = place.worker_group(
        received.events,
        ranks=2,
        behaviour=Behaviour(notes=str(tmp_path)),
        limits=limits(heartbeat_s=0.25, rank_timeout_s=2),
    )

    def beats(rank: int) -> int:
        return (tmp_path / f"heard-{rank}").read_text().count("Heartbeat\n")

    async with started(worker_group):
        pids = worker_group.pids
        await until(
            lambda: received.lost or min(beats(0), beats(1)) >= IDLE_BEATS,
            "heartbeats",
            limit_s=PATIENCE_S + IDLE_BEATS,
        )
        assert received.lost == []
        assert all(is_running(pid) for pid in pids)
        worker_group.leader("generate").decide(first_step())
        await received.wait_until(lambda: received.results)
        assert received.lost == []
