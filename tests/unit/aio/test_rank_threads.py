"""The number of threads of ranks: which of its changes the engine logs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from vsched.aio.replicas.worker_group import RankThreads
from vsched.sim.loop import VirtualLoop
from vsched.wire import ThreadsInUse

BUSY = "threads: other programs keep the cores busy"
BACK = "computes with all of its"


def lines_of(
    caplog: pytest.LogCaptureFixture, changes: Sequence[tuple[float, int]], total: int
) -> list[tuple[float, str]]:
    """Log lines, each with its second, for a rank that reports these numbers at these seconds."""
    caplog.set_level(logging.INFO)
    lines: list[tuple[float, str]] = []

    async def report() -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        threads = RankThreads(["encode", "generate"])
        for at_s, active in changes:
            loop.call_at(started_s + at_s, threads.take, 0, ThreadsInUse(active, total))
        for second in range(60):
            await asyncio.sleep(started_s + second + 0.5 - loop.time())
            lines.extend((second, line) for line in caplog.messages)
            caplog.clear()
        threads.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(report())
    return lines


@pytest.mark.parametrize(
    ("changes", "total", "expected"),
    [
        ([(0, 2)], 2, []),
        ([(0, 2), (10, 1)], 2, [(15, f"computes with 1 of 2 {BUSY}")]),
        ([(0, 1)], 2, [(5, f"computes with 1 of 2 {BUSY}")]),
        # Not long enough.
        ([(0, 2), (10, 1), (14, 2), (16, 1), (20, 2)], 2, []),
        # Another number restarts the five seconds, the same does not.
        ([(0, 4), (10, 3), (13, 1)], 4, [(18, f"computes with 1 of 4 {BUSY}")]),
        ([(0, 2), (10, 1), (13, 1)], 2, [(15, f"computes with 1 of 2 {BUSY}")]),
        (
            [(0, 4), (10, 1), (30, 3), (40, 4)],
            4,
            [
                (15, f"computes with 1 of 4 {BUSY}"),
                (35, f"computes with 3 of 4 {BUSY}"),
                (45, f"{BACK} 4 threads again"),
            ],
        ),
        # Back for a moment.
        (
            [(0, 2), (10, 1), (20, 2), (22, 1), (30, 2)],
            2,
            [(15, f"computes with 1 of 2 {BUSY}"), (35, f"{BACK} 2 threads again")],
        ),
        ([(0, 2), (57, 1)], 2, []),
    ],
)
def test_change_of_threads_is_logged_once_it_has_lasted(
    changes: list[tuple[float, int]],
    total: int,
    expected: list[tuple[float, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = lines_of(caplog, changes, total)
    assert lines == [(at_s, f"encode and generate rank 0 {line}") for at_s, line in expected]
