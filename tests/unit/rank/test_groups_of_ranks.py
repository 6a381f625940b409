"""Several real rank processes as one group: they agree, divergence is detected, and they idle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from tests.patience import NEVER_S, PATIENCE_S, until
from tests.unit.rank.fake_plugin import Behaviour
from tests.unit.rank.worker_groups import Place, Received, is_running, limits
from vsched.aio.worker_groups import WorkerGroup
from vsched.kernel.decisions import ChunkPlan, EncodeDecision, GenerateDecision, Join, RequestData
from vsched.types import SamplingParams
from vsched.wire import EncodeResult, GenerateResult

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


async def steps(
    worker_group: WorkerGroup, received: Received, count: int, *, group: str = "generate"
) -> None:
    """Run steps in a new group, or until something is lost."""
    for step in range(1, count + 1):
        worker_group.leader(group).decide(first_step() if step == 1 else GenerateDecision(step))
        await answered(received, step)


@asynccontextmanager
async def started(*worker_groups: WorkerGroup) -> AsyncIterator[None]:
    """Start worker groups, and leave no process behind, stopped or not."""
    try:
        await asyncio.gather(*(worker_group.start() for worker_group in worker_groups))
        yield
    finally:
        for worker_group in worker_groups:
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


async def test_group_that_is_stopped_stalls_no_other(place: Place, tmp_path: Path) -> None:
    """One rank of a group does not read: sending to it never blocks, and another group goes on."""
    deaf_received, received = Received(), Received()
    patient = limits(rank_timeout_s=NEVER_S)
    run_dir = tmp_path / "other"
    run_dir.mkdir(mode=0o700)
    with closing(Place(run_dir)) as other:
        backlogged = place.worker_group(deaf_received.events, ranks=2, limits=patient)
        worker_group = other.worker_group(received.events, ranks=2)
        async with started(backlogged, worker_group):
            os.kill(backlogged.pids[1], signal.SIGSTOP)
            backlogged.leader("generate").decide(first_step())
            sent, step = 1, 0
            while not deaf_received.lost:
                step += 1
                worker_group.leader("generate").decide(
                    first_step() if step == 1 else GenerateDecision(step)
                )
                for _ in range(25):  # far more than a kernel would have in flight
                    sent += 1
                    backlogged.leader("generate").decide(GenerateDecision(sent))
                await answered(received, step)
                assert len(received.results) == step
                # The rank that reads keeps up, however busy the machine is: only the other one falls behind.
                await answered(deaf_received, sent)
                assert sent < 5000
            assert received.lost == []
            ((_, reason),) = deaf_received.lost
            assert reason.startswith("generate: rank 1 ")
            assert "behind" in reason or "does not read" in reason


async def test_group_together_follows_one_order(place: Place) -> None:
    """Two ranks that serve both stages carry out the steps of the two logs in the order they were decided."""
    received = Received()
    worker_group = place.worker_group(received.events, groups=("encode", "generate"), ranks=2)
    async with started(worker_group):
        decided = []
        for step in range(1, 101):
            first = ("encode", "generate") if step % 3 else ("generate", "encode")
            for group in first:
                decided.append((group, step))
                if group == "encode":
                    worker_group.leader(group).decide(EncodeDecision(step, []))
                else:
                    worker_group.leader(group).decide(
                        first_step() if step == 1 else GenerateDecision(step)
                    )
            if step % 10 == 0:
                await answered(received, len(decided))
        assert received.lost == []
        kinds = {"encode": EncodeResult, "generate": GenerateResult}
        assert all(isinstance(result, kinds[group]) for group, result in received.results)
        for group in kinds:
            assert [one.step for name, one in received.results if name == group] == list(
                range(1, 101)
            )


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
