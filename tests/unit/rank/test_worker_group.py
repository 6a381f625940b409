"""Real rank processes behind a worker group: parallel start, reasons of failures, and clean ends."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.patience import NEVER_S, patience
from tests.programs import ended
from tests.unit.rank.fake_plugin import Behaviour
from tests.unit.rank.worker_groups import KV_TOKENS, Place, Received, is_running, limits, started
from tests.unit.worker.test_generate_rank import join, prefill
from vsched.aio.launcher import RankProcess
from vsched.errors import DeviceOutOfMemory, GroupLostError
from vsched.kernel.decisions import ChunkPlan, GenerateDecision
from vsched.transport.zmq_link import LeaderLink

pytestmark = pytest.mark.slow
QUIET = limits(heartbeat_s=60)
"""Without heartbeats, one of which could find a rank gone before its exit is noticed."""


def one_request() -> GenerateDecision:
    return prefill(join(1, 0, [7, 7, 7], blocks=[0, 1]))


async def test_worker_group_starts_all_ranks_in_parallel(place: Place, tmp_path: Path) -> None:
    """Every rank waits for the others while it loads; started one by one they would never be ready.

    `Stop` in the log ends every rank with code 0, without waiting for the grace period.
    """
    meet = tmp_path / "meet"
    meet.mkdir()
    received = Received()
    worker_group = place.worker_group(
        received.events, ranks=2, behaviour=Behaviour(meet=str(meet), meet_ranks=2, hook_s=5.0)
    )
    ready = await worker_group.start()
    assert [one.kv_blocks for one in ready["generate"]] == [KV_TOKENS // 4] * 2
    assert [one.hooks for one in ready["generate"]] == [{"balance": 5.0}] * 2
    pids = worker_group.pids
    assert [process_names(pid) for pid in pids] == [
        ("vsched: generat", f"vsched: generate rank {rank}") for rank in range(2)
    ]
    assert ("generate", "weights", 1.0) in received.progress
    leader = worker_group.leader("generate")
    assert [leader.memory[rank]["kv"] for rank in (0, 1)] == [KV_TOKENS * 8] * 2
    leader.decide(one_request())
    await received.wait_until(lambda: received.results)
    codes: list[int] = []
    for process in worker_group._processes:
        assert isinstance(process, RankProcess)
        process._on_exit = codes.append
    async with patience():
        await worker_group.stop(grace_s=NEVER_S)
    assert codes == [0, 0]
    assert not any(is_running(pid) for pid in pids)
    assert received.lost == []


def process_names(pid: int) -> tuple[str, str]:
    """Return the name of a process and its command line, as `ps` and `top` show them."""
    folder = Path(f"/proc/{pid}")
    return (folder / "comm").read_text().strip(), (folder / "cmdline").read_text().strip("\0 ")


async def test_worker_group_rank_that_dies_while_it_loads_names_phase_limit_and_settings(
    place: Place, tmp_path: Path
) -> None:
    """`std::bad_alloc` ends a process before it can report anything; here, after its progress was reported."""
    groups, keys = ["encode", "generate"], "encode.memory_limit or generate.memory_limit"
    received, meet = Received(), tmp_path / "meet"
    meet.mkdir()
    worker_group = place.worker_group(
        received.events,
        groups=groups,
        behaviour=Behaviour(meet=str(meet), meet_ranks=2, load_signal=signal.SIGABRT),
        memory_limit_bytes=1 << 40,
    )
    starting = asyncio.create_task(worker_group.start())
    await received.wait_until(lambda: any(what == "weights" for _, what, _ in received.progress))
    (meet / "heard").touch()
    with pytest.raises(GroupLostError) as caught:
        await starting
    message = str(caught.value)
    assert message.startswith(f"{' and '.join(groups)}: rank 0 was killed by SIGABRT; it was last ")
    assert f"last weights, under a memory limit of {1 << 40} bytes ({keys})" in message
    assert f"Remedy: raise {keys}; " in message


@pytest.mark.parametrize("cancelled", [False, True])
async def test_start_that_ends_early_leaves_no_process(place: Place, *, cancelled: bool) -> None:
    """The deadline for readiness passes, and the message names its setting; or the start is cancelled."""
    received = Received()
    worker_group = place.worker_group(
        received.events,
        behaviour=Behaviour(load_s=60),
        limits=limits(ready_s=NEVER_S if cancelled else 0.2),
    )
    starting = asyncio.ensure_future(worker_group.start())
    await asyncio.sleep(0.05)
    pids = worker_group.pids
    if cancelled:
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await worker_group.stop(grace_s=0)
    else:
        late = r"generate: not ready after 0\.2 s \(deadlines\.ready_s\)"
        with pytest.raises(GroupLostError, match=late):
            await starting
    assert pids
    assert not any(is_running(pid) for pid in pids)
    assert received.lost == []


BOTH = ["encode", "generate"]


@pytest.mark.parametrize(
    ("groups", "limit_bytes", "name", "error", "message"),
    [
        (["generate"], 1 << 40, "DeviceOutOfMemory", DeviceOutOfMemory, "^weights.* is not there$"),
        # The worker names the limit of its own stage; with both stages, raising the other one helps, too.
        pytest.param(
            *(BOTH, 1 << 40, "DeviceOutOfMemory", DeviceOutOfMemory, "encode.* for the two add up"),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            *(["generate"], 0, "RuntimeError", GroupLostError, "stopped with RuntimeError: wei"),
            marks=pytest.mark.thorough,
        ),
        # An error that no worker has turned into one of vsched's names its setting.
        pytest.param(
            *(["encode"], 0, "MemoryError", DeviceOutOfMemory, r"starting\. .* encode\.memory_li"),
            marks=pytest.mark.thorough,
        ),
    ],
)
async def test_worker_group_reports_why_a_rank_cannot_load(
    place: Place,
    groups: list[str],
    limit_bytes: int,
    name: str,
    error: type[Exception],
    message: str,
) -> None:
    """The rank's report reaches the caller as the same error, without waiting for the deadline."""
    received, behaviour = Received(), Behaviour(load_error=name)
    worker_group = place.worker_group(
        received.events, groups=groups, behaviour=behaviour, memory_limit_bytes=limit_bytes
    )
    async with patience():
        with pytest.raises(error, match=message):
            await worker_group.start()
    assert worker_group.pids == []
    assert received.lost == []


async def test_rank_that_ends_by_itself_as_it_is_killed_fails_no_stop(place: Place) -> None:
    """Such as the peer of a killed rank: it is reaped in the turn of the loop in which its time is over."""
    async with started(place, limits=QUIET) as (worker_group, _):
        (process,) = worker_group._processes
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - the loop must not see its end
        await process.wait_exit(grace_s=0)
        assert not is_running(process.pid)


async def test_worker_group_hears_the_last_word_of_a_rank_that_exits_first(place: Place) -> None:
    """On a busy machine, the last report is still in flight when the process has ended."""
    async with started(place, limits=QUIET) as (worker_group, received):
        (process,) = worker_group._processes
        assert isinstance(process, RankProcess)
        leader = worker_group.leader("generate")
        assert isinstance(leader._link, LeaderLink)
        late: list[partial[None]] = []
        take = leader._link._on_frame
        leader._link._on_frame = lambda sender, frame: late.append(partial(take, sender, frame))
        process._exited.add_done_callback(lambda _: [word() for word in late])
        leader.decide(GenerateDecision(1, chunks=[ChunkPlan(2, 0, 3, [])]))
        await received.wait_until(lambda: received.lost)
        assert "RankDesync" in received.lost[0][1]


async def test_worker_group_ranks_leave_signals_to_the_engine(place: Place) -> None:
    """A service manager sends its signal to all processes at once; the engine drains with its ranks."""
    async with started(place) as (worker_group, received):
        (pid,) = worker_group.pids
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        worker_group.leader("generate").decide(one_request())
        await received.wait_until(lambda: received.results or received.lost)
        assert received.lost == []


def test_rank_without_a_specification_exits() -> None:
    """An engine that dies before it sends anything leaves no rank waiting."""
    assert ended("-m", "vsched.rank").returncode == 3
